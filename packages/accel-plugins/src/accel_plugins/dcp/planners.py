"""Plan what a rank writes and reads with PyTorch's own planners: plain tensors and DTensors."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    import io
    from collections.abc import Mapping

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner


class TorchPlanners:
    """Plans for plain tensors and DTensors; rank 0 writes replicated tensors and objects."""

    def plan_save(self, state: Mapping[str, Any], rank: int) -> tuple[SavePlanner, SavePlan]:
        """Plan what this rank writes."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(state), is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        items = [item for item in plan.items if _is_ours(item, planner.state_dict[item.index.fqn], rank)]
        return planner, replace(plan, items=items)

    def plan_load(
        self, state: dict[str, Any], index: Metadata, *, strict: bool, flat: bool
    ) -> tuple[LoadPlanner, LoadPlan]:
        """Plan what this rank reads."""
        planner = _LoadPlanner(flatten_state_dict=not flat, allow_partial_load=not strict)
        planner.set_up_planner(state, index, is_coordinator=False)
        return planner, planner.create_local_plan()


def _is_ours(item: WriteItem, value: Any, rank: int) -> bool:
    """Whether this rank writes an item: it follows from the placements, ranks exchange nothing."""
    if item.type is not WriteItemType.SHARD or not isinstance(value, DTensor) or item.tensor_data is None:
        return rank == 0
    coordinate = value.device_mesh.get_coordinate() or ()  # a rank outside of the mesh has no item
    replicas = [
        index
        for index, placement in zip(coordinate, value.placements, strict=True)
        if placement.is_replicate()  # FSDP2 on tensor-parallel shards has `_StridedShard`
    ]
    has_any = math.prod(item.tensor_data.chunk.sizes) > 0
    return not any(replicas) and (has_any or (not value.numel() and not any(coordinate)))


class _LoadPlanner(DefaultLoadPlanner):
    """Load plan that unpickles objects with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        load_object(self.original_state_dict, self.mappings.get(key, (key,)), value)


def load_object(state: Any, path: tuple[str | int, ...], file: io.BytesIO) -> None:
    """Set a value in a state to a pickled object, which is read with `weights_only=True`."""
    put(state, path, torch.load(file, weights_only=True))


def put(state: Any, path: tuple[str | int, ...], value: Any) -> None:
    """Set a value in nested dictionaries and lists, adding those that are missing.

    Example:
        >>> state = {}
        >>> put(state, ("a", 1, "b"), 5)
        >>> state
        {'a': [None, {'b': 5}]}
    """
    container = state
    for key, following in pairwise(path):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(key, int):
            container.extend([None] * (key + 1 - len(container)))
            if container[key] is None:
                container[key] = empty
            container = container[key]
        else:
            container = container.setdefault(key, empty)
    last = path[-1]
    if isinstance(last, int):
        container.extend([None] * (last + 1 - len(container)))
    container[last] = value
