"""Gather full state dicts from shards, and load full state dicts into shards, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accel_plugins.dcp.tensors import named_state, numbered_state
from accel_plugins.sharding.shards import gather_full_tensor, names_of_each, shard_like

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import ShardedStates
    from accel_plugins.roles import StateDict


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardsPersister:
    """Gather and load full state dicts through any `ShardedStates`."""

    shards: ShardedStates
    device: torch.device

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Gather the full state dict to the CPU; tied tensors share memory."""
        state = self.shards.model_tensors(model)
        found: StateDict = {}
        for tensors in self._iter_full(state, keep=keep):
            found |= tensors
        return {name: found[name] for name in state} if keep else {}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Gather the full state dict to the CPU tensor by tensor; tied names come together."""
        return self._iter_full(self.shards.model_tensors(model), keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load this rank's shards of a full state dict."""
        like = self.shards.model_tensors(model)
        shards = {name: _shard(value, like.get(name)) for name, value in state.items()}
        return self.shards.load_model(model, shards, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Gather the optimizer's full state dict, as a single process has it, to the CPU."""
        state = self.shards.optimizer_tensors(optimizer, models)
        names = [group["params"] for group in state["param_groups"]]
        return numbered_state(self._full(state, keep=keep), names)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load this rank's shards of an optimizer's full state dict."""
        groups = self.shards.optimizer_tensors(optimizer, models)["param_groups"]
        named = named_state(state, [group["params"] for group in groups])
        allocate = self.shards.state_allocator(optimizer, models)
        named["state"] = {
            name: {
                key: _shard(value, allocate(name, value.shape, value.dtype))
                if isinstance(value, Tensor)
                else value
                for key, value in values.items()
            }
            for name, values in named["state"].items()
        }
        self.shards.load_optimizer(optimizer, models, named)

    def _iter_full(self, state: StateDict, *, keep: bool) -> Iterator[StateDict]:
        for names, value in names_of_each(state):
            full = self._full(value, keep=keep)
            yield dict.fromkeys(names, full) if keep else {}
            del full  # freed before the next tensor is gathered

    def _full(self, state: Any, *, keep: bool) -> Any:
        """Gather the tensors of nested dictionaries; every rank takes part, those with `keep` return them."""
        if isinstance(state, dict):
            items: dict[Any, Any] = state
            done = {key: self._full(value, keep=keep) for key, value in items.items()}
            return done if keep else {key: value for key, value in done.items() if value is not None}
        if not isinstance(state, Tensor):
            return state
        full = gather_full_tensor(state, self.device)
        return full.cpu() if keep else None


def _shard(value: Any, like: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.shape != like.shape:
        return value
    return shard_like(value.to(like.dtype), like)
