"""Whole state dicts out of shards and into shards, one tensor after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_plugins.dcp.local import LocalFiles
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.tensors import named_state, numbered_state
from accel_plugins.sharding.shards import gather_full_tensor, names_of_each, part_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import ShardedStates
    from accel_plugins.roles import StateDict, Write
    from accel_state.topology import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsPersister:
    """A `Persister` for any `ShardedStates`.

    Args:
        shards: Gives what this rank holds.
        device: Where ranks communicate.
        topology: Which process this is among how many.
    """

    shards: ShardedStates
    device: torch.device
    topology: Topology

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save) -> None:
        """Write `pytorch_model.bin`, with `_<index>` before the ending from the second model on.

        A strategy that wants its own form gets one file for every rank: `pytorch_model_fsdp_rank0.bin`.
        """
        if self.shards.form() is StateForm.OWN:
            self._local.save_model(model, directory, index, write=write)
            return
        state = self.full_state_dict(model, keep=self.topology.is_main)
        if self.topology.is_main:
            write(state, directory / _file("pytorch_model", index))

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back."""
        if self.shards.form() is StateForm.OWN:
            self._local.load_model(model, directory, index)
            return
        path = directory / _file("pytorch_model", index)
        self.load_full_state_dict(model, torch.load(path, map_location="cpu", weights_only=True))

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = torch.save,
    ) -> None:
        """Write `optimizer.bin`, with `_<index>` before the ending from the second optimizer on."""
        if self.shards.form() is StateForm.OWN:
            self._local.save_optimizer(optimizer, model, directory, index, write=write)
            return
        state = self.full_optimizer_state(optimizer, [model], keep=self.topology.is_main)
        if self.topology.is_main:
            write(state, directory / _file("optimizer", index))

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back."""
        if self.shards.form() is StateForm.OWN:
            self._local.load_optimizer(optimizer, model, directory, index)
            return
        path = directory / _file("optimizer", index)
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.load_full_optimizer_state(optimizer, [model], state)

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """The whole state dict, on the CPU; tied tensors share memory."""
        state = self.shards.model_tensors(model)
        found: StateDict = {}
        for part in self._parts(state, keep=keep):
            found |= part
        return {name: found[name] for name in state} if keep else {}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """One tensor after the other, on the CPU; tied ones together."""
        return self._parts(self.shards.model_tensors(model), keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load this rank's parts of a whole state dict."""
        like = self.shards.model_tensors(model)
        parts = {name: _part(value, like.get(name)) for name, value in state.items()}
        return self.shards.load_model(model, parts, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """The state dict of the optimizer in a run of one process, on the CPU."""
        state = self.shards.optimizer_tensors(optimizer, models)
        names = [group["params"] for group in state["param_groups"]]
        return numbered_state(self._full(state, keep=keep), names)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load this rank's parts of a whole state dict."""
        groups = self.shards.optimizer_tensors(optimizer, models)["param_groups"]
        named = named_state(state, [group["params"] for group in groups])
        allocate = self.shards.state_allocator(optimizer, models)
        named["state"] = {
            name: {
                key: _part(value, allocate(name, value.shape, value.dtype))
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }
            for name, values in named["state"].items()
        }
        self.shards.load_optimizer(optimizer, models, named)

    @property
    def _local(self) -> LocalFiles:
        return LocalFiles(shards=self.shards, topology=self.topology)

    def _parts(self, state: StateDict, *, keep: bool) -> Iterator[StateDict]:
        for names, value in names_of_each(state):
            full = self._full(value, keep=keep)
            yield dict.fromkeys(names, full) if keep else {}
            del full  # before the next one comes

    def _full(self, state: Any, *, keep: bool) -> Any:
        """The same nested dictionaries with whole tensors; where they are not kept, without."""
        if isinstance(state, dict):
            items: dict[Any, Any] = state
            done = {key: self._full(value, keep=keep) for key, value in items.items()}
            return done if keep else {key: value for key, value in done.items() if value is not None}
        if not isinstance(state, Tensor):
            return state
        full = gather_full_tensor(state, self.device)
        return full.cpu() if keep else None


def _part(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.shape != like.shape:
        return value
    return part_like(value.to(like.dtype), like)


def _file(stem: str, index: int) -> str:
    return f"{stem}.bin" if index == 0 else f"{stem}_{index}.bin"
