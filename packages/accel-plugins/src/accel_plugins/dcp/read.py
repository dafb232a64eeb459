"""Read a DCP folder into tensors of any sharding, without collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # pyright: ignore[reportPrivateUsage] - how keys come from names
from torch.distributed.checkpoint.filesystem import FileSystemReader

from accel_plugins.dcp.index import DAMAGE, entries, read_index
from accel_plugins.dcp.planners import TorchPlanners, put
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

    from accel_plugins.dcp.index import Entry
    from accel_plugins.dcp.protocol import RankPlanners


def read_into(
    folder: Path,
    state: dict[str, Any],
    *,
    strict: bool = True,
    flat: bool = False,
    planners: RankPlanners | None = None,
) -> None:
    """Read this rank's shards of a state in place.

    Args:
        folder: A DCP folder with an index.
        state: Nested dictionaries and lists, as they were saved. Tensors and DTensors are filled in place;
            other values are replaced.
        strict: Whether the folder must have every key of `state`; else values without one are unchanged.
        flat: Whether the keys of `state` are already those of the folder's index.
        planners: Plan what is read; PyTorch's, for plain tensors and DTensors, if `None`.

    Raises:
        CheckpointError: The folder is damaged, or does not fit `state`.
    """
    index = read_index(folder)
    _check_fit(folder, index, state if flat else flatten_state_dict(state)[0], strict=strict)
    reader = FileSystemReader(folder)
    try:
        planner, plan = (planners or TorchPlanners()).plan_load(state, index, strict=strict, flat=flat)
        reader.set_up_storage_reader(index, is_coordinator=False)
        reader.read_data(reader.prepare_local_plan(plan), planner).wait()
    except (OSError, *DAMAGE) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{str(folder)!r} cannot be read: {reason}.") from error


def read_all(
    folder: Path, allocate: Callable[[Entry], Any], planners: RankPlanners | None = None
) -> dict[str, Any]:
    """Read every value of a DCP folder into nested dictionaries and lists, as they were saved.

    `allocate` makes the destination tensor of an entry with a shape.
    """
    state: dict[str, Any] = {}
    for entry in entries(read_index(folder)):
        put(state, entry.path, None if entry.shape is None else allocate(entry))
    read_into(folder, state, planners=planners)
    return state


def _check_fit(folder: Path, index: Metadata, wanted: Mapping[str, Any], *, strict: bool) -> None:
    present = {entry.key: entry for entry in entries(index)}
    for key, value in wanted.items():
        entry = present.get(key)
        if entry is None:
            if strict:
                hint = did_you_mean(key, present, f"it has {len(present)} others.")
                raise CheckpointError(f"{str(folder)!r} has no {key!r}; {hint}")
        elif isinstance(value, torch.Tensor) and entry.shape is not None and value.shape != entry.shape:
            raise CheckpointError(
                f"{str(folder)!r} has {key!r} with shape {tuple(entry.shape)}, but this run's has shape "
                f"{tuple(value.shape)}: build the model as in the run that was saved."
            )
