"""Save and load shards of compiler-sharded tensors, with the planners of torch_xla."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # pyright: ignore[reportPrivateUsage] - how keys come from names
from torch.distributed.checkpoint.planner import WriteItemType

from accel_plugins.dcp.planners import load_object
from accel_plugins.dcp.tensors import allocator_like
from accel_plugins.xla.spmd import shard, xla_module
from accel_state.devices.xla import library

if TYPE_CHECKING:
    import io
    from collections.abc import Generator, Mapping

    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem

    from accel_plugins.dcp.protocol import StateAllocator


class SpmdPlanners:
    """Plans for tensors that the compiler shards: every process writes and reads the shards of its devices.

    Of a tensor that several devices have alike, the first replica is written. (In torch_xla 2.9
    `SPMDSavePlanner.create_global_plan` leaves all of them out, if one process has them.)
    """

    def plan_save(self, state: Mapping[str, Any], rank: int) -> tuple[Any, SavePlan]:
        """Plan what this process writes."""
        flat, paths = flatten_state_dict(dict(state))
        planner = xla_module("experimental.distributed_checkpoint").SPMDSavePlanner()
        planner.set_up_planner(flat, is_coordinator=rank == 0)
        plan = planner.create_local_plan()
        items = [item for item in plan.items if _is_ours(item, planner.sharded_state_dict, rank)]
        return _SavedShards(planner), replace(plan, items=items, planner_data=paths)

    def plan_load(
        self, state: dict[str, Any], index: Metadata, *, strict: bool, flat: bool
    ) -> tuple[Any, LoadPlan]:
        """Plan what this process reads."""
        wanted, paths = (state, {}) if flat else flatten_state_dict(state)
        if not strict:
            wanted = {key: value for key, value in wanted.items() if key in index.state_dict_metadata}
        planner = xla_module("experimental.distributed_checkpoint").SPMDLoadPlanner()
        planner.set_up_planner(wanted, index, is_coordinator=False)
        return _LoadedShards(planner, state, paths), planner.create_local_plan()


@dataclass(frozen=True, slots=True)
class SpmdAllocator:
    """Makes allocators of optimizer states that are sharded over a mesh as parameters are."""

    mesh: Any

    def __call__(self, parameters: Mapping[str, Tensor]) -> StateAllocator:
        """Return an allocator of tensors sharded like the parameter of the same name and shape, else full."""
        allocate_plain = allocator_like({})

        def allocate(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
            tensor, parameter = allocate_plain(name, shape, dtype), parameters.get(name)
            if parameter is None or parameter.shape != shape or not shape:
                return tensor
            tensor = tensor.to(parameter.device)
            shard(tensor, self.mesh)
            return tensor

        return allocate


@dataclass(frozen=True, slots=True)
class _SavedShards:
    """Gives the values of a `SPMDSavePlanner`."""

    planner: Any

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        """Return a shard on the CPU, a full tensor or an object as bytes."""
        with _quiet():
            return self.planner.resolve_data(item)


@dataclass(frozen=True, slots=True)
class _LoadedShards:
    """Hands tensors to a `SPMDLoadPlanner`; objects are read with `weights_only=True`."""

    planner: Any
    state: dict[str, Any]
    paths: Mapping[str, Any]

    def load_bytes(self, item: ReadItem, value: io.BytesIO) -> None:
        """Set an object in the state."""
        key = item.dest_index.fqn
        load_object(self.state, self.paths.get(key, (key,)), value)

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        """Return where a tensor, or a shard, is read to."""
        with _quiet():
            return self.planner.resolve_tensor(item)

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Copy the shards of a tensor to their devices when all were read."""
        self.planner.commit_tensor(item, tensor)


@contextmanager
def _quiet() -> Generator[None]:
    """Index shards as torch_xla does, without torch's warning about it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using a non-tuple sequence")
        yield


def _is_ours(item: WriteItem, sharded: Mapping[str, Any], rank: int) -> bool:
    """Whether this process writes an item: of shards the first replica, of everything else rank 0."""
    if item.type is not WriteItemType.SHARD or item.tensor_data is None:
        return rank == 0
    tensor = sharded[item.index.fqn].global_tensor
    (shards,) = library()._XLAC._get_local_shard_replica_and_indices([tensor])
    replica, _ = shards[item.index.index]
    return replica == 0 and math.prod(item.tensor_data.chunk.sizes) > 0
