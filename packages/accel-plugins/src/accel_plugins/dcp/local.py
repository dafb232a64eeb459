"""Local state dicts: one file per rank with that rank's shards, read by the same world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_plugins.dcp.write import compact
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import ShardedStates
    from accel_plugins.roles import Write
    from accel_state.topology import Topology

_PART, _SHAPE = "part", "shape_of_whole"
MODEL, OPTIMIZER = "pytorch_model_fsdp", "optimizer_fsdp"
"""Stems of the files' names, for `local_file`."""


def save_local(state: Any, path: Path, world_size: int, *, write: Write = torch.save) -> None:
    """Write this rank's local state."""
    write({"world_size": world_size, "state": _packed(state)}, path)


def load_local(
    path: Path, world_size: int, allocate: Callable[[tuple[Any, ...], torch.Size, torch.dtype], Tensor]
) -> Any:
    """Read what `save_local` wrote.

    `allocate` makes a destination tensor, sharded as in this run, from the keys that lead to it and the shape
    and dtype of the full tensor.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{str(path)!r}, the local state dict of this rank, does not exist: load the folder that "
            "save_state wrote with LOCAL_STATE_DICT on the same ranks."
        )
    found = torch.load(path, map_location="cpu", weights_only=True)
    if found["world_size"] != world_size:
        raise CheckpointError(
            f"{str(path)!r} was saved with world size {found['world_size']}, but this run has {world_size}: "
            "local state dicts load only with the same world size. Save with SHARDED_STATE_DICT instead."
        )
    return _unpacked(found["state"], (), allocate, path)


def _packed(state: Any) -> Any:
    if isinstance(state, DTensor):
        return {_PART: compact(state.to_local().detach().cpu()), _SHAPE: tuple(state.shape)}
    if isinstance(state, dict):
        items: dict[Any, Any] = state
        return {key: _packed(value) for key, value in items.items()}
    return state.detach().cpu() if isinstance(state, Tensor) else state


def _unpacked(
    state: Any,
    keys: tuple[Any, ...],
    allocate: Callable[[tuple[Any, ...], torch.Size, torch.dtype], Tensor],
    path: Path,
) -> Any:
    if not isinstance(state, dict):
        return state
    items: dict[Any, Any] = state
    if items.keys() != {_PART, _SHAPE}:
        return {key: _unpacked(value, (*keys, key), allocate, path) for key, value in items.items()}
    part, shape = items[_PART], torch.Size(items[_SHAPE])
    target: Any = allocate(keys, shape, part.dtype)
    local: Tensor = target.to_local() if isinstance(target, DTensor) else target
    if local.shape != part.shape:
        raise CheckpointError(
            f"{str(path)!r}: this rank's shard of {'.'.join(map(str, keys))!r} has shape "
            f"{tuple(local.shape)}, but the saved one has {tuple(part.shape)}. Wrap the model as in the "
            "run that was saved."
        )
    local.copy_(part)
    return target


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFiles:
    """Save and load models and optimizers as one file per rank."""

    shards: ShardedStates
    topology: Topology

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save) -> None:
        """Write `pytorch_model_fsdp_rank<rank>.bin`, or `pytorch_model_fsdp_<index>_rank<rank>.bin`."""
        path = self._file(directory, MODEL, index)
        save_local(self.shards.model_tensors(model), path, self.topology.world_size, write=write)

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load what `save_model` wrote."""
        like = self.shards.model_tensors(model)
        path = self._file(directory, MODEL, index)
        self.shards.load_model(
            model, load_local(path, self.topology.world_size, lambda keys, *_: like[keys[0]])
        )

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = torch.save,
    ) -> None:
        """Write `optimizer_fsdp_rank<rank>.bin`, or `optimizer_fsdp_<index>_rank<rank>.bin`."""
        path = self._file(directory, OPTIMIZER, index)
        state = self.shards.optimizer_tensors(optimizer, [model])
        save_local(state, path, self.topology.world_size, write=write)

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Load what `save_optimizer` wrote."""
        allocate = self.shards.state_allocator(optimizer, [model])
        path = self._file(directory, OPTIMIZER, index)
        state = load_local(path, self.topology.world_size, lambda keys, *what: allocate(keys[1], *what))
        self.shards.load_optimizer(optimizer, [model], state)

    def _file(self, directory: Path, stem: str, index: int) -> Path:
        return directory / local_file(stem, index, self.topology.rank)


def local_file(stem: str, index: int, rank: int) -> str:
    """Return the name of the file with a rank's local state of a model or an optimizer.

    Example:
        >>> local_file(MODEL, 1, 0)
        'pytorch_model_fsdp_1_rank0.bin'
    """
    number = f"_{index}" if index else ""
    return f"{stem}{number}_rank{rank}.bin"
