"""Full state dicts of sharded models and optimizers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.sharding.shards import gather_full_tensor, names_of_each, shard_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict, Write


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPersister:
    """Gather states to the CPU tensor by tensor, and shard what is loaded.

    Args:
        is_main: Whether this process writes files.
        device: Device of the collectives.
    """

    is_main: bool
    device: torch.device

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save) -> None:
        """Write `pytorch_model.bin`; `pytorch_model_<index>.bin` from the second model on."""
        state = self.full_state_dict(model, keep=self.is_main)
        if self.is_main:
            write(state, directory / _file("pytorch_model", index))

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Load what `save_model` wrote."""
        self.load_full_state_dict(model, _load(directory / _file("pytorch_model", index)))

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = torch.save,
    ) -> None:
        """Write `optimizer.bin`; `optimizer_<index>.bin` from the second optimizer on."""
        state = self.full_optimizer_state(optimizer, [model], keep=self.is_main)
        if self.is_main:
            write(state, directory / _file("optimizer", index))

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Load what `save_optimizer` wrote."""
        self.load_full_optimizer_state(optimizer, [model], _load(directory / _file("optimizer", index)))

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Gather the full state dict to the CPU; tied tensors share memory."""
        state = _core(model).state_dict(keep_vars=True)
        found: StateDict = {}
        for tensors in self._iter_full(state, keep=keep):
            found |= tensors
        return {name: found[name] for name in state} if keep else {}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Gather the full state dict to the CPU tensor by tensor; tied names come together."""
        return self._iter_full(_core(model).state_dict(keep_vars=True), keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load this rank's shards of a full state dict."""
        core = _core(model)
        now = core.state_dict(keep_vars=True)
        shards = {
            name: shard_like(value, now[name])
            if isinstance(value, Tensor)
            and isinstance(now.get(name), Tensor)
            and value.shape == now[name].shape
            else value
            for name, value in state.items()
        }
        return core.load_state_dict(shards, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Gather the optimizer's full state dict, as a single process has it, to the CPU."""
        del models
        state = optimizer.state_dict()
        full: dict[Any, Any] = {}
        for key, items in state["state"].items():
            full[key] = {name: self._full(value, keep=keep) for name, value in items.items()}
        return {**state, "state": full} if keep else {}

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load this rank's shards of an optimizer's full state dict."""
        del models
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        keys = [key for group in state["param_groups"] for key in group["params"]]
        owners = dict(zip(keys, parameters, strict=False))
        shards = {
            key: {name: _shard(value, owners.get(key)) for name, value in items.items()}
            for key, items in state["state"].items()
        }
        optimizer.load_state_dict({**state, "state": shards})

    def _iter_full(self, state: StateDict, *, keep: bool) -> Iterator[StateDict]:
        for names, value in names_of_each(state):
            full = self._full(value, keep=keep)
            yield dict.fromkeys(names, full) if keep else {}
            del full  # freed before the next tensor is gathered

    def _full(self, value: Any, *, keep: bool) -> Any:
        if not isinstance(value, Tensor):
            return value
        full = gather_full_tensor(value, self.device)
        return full.cpu() if keep else None


def _shard(value: Any, owner: Tensor | None) -> Any:
    if owner is None or not isinstance(value, Tensor) or value.shape != owner.shape:
        return value
    return shard_like(value, owner)


def _core(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


def _file(stem: str, index: int) -> str:
    return f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin"


def _load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
