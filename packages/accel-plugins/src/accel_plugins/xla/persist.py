"""Save and load what the compiler shards: every process copies to its host, the main process writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.tree import recursively_apply
from accel_ops.weights.tensors import tensor_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict
    from accel_plugins.strategies.replicated import ReplicatedPersister


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerShardedPersister:
    """Persister of models that the compiler shards.

    Args:
        full: Reads and loads full states on the devices.
    """

    full: ReplicatedPersister

    def full_state_dict(self, model: nn.Module, *, keep: bool = True) -> StateDict:
        """Copy the state dict of the model to the CPU; tied tensors share memory."""
        state = self.full.full_state_dict(model)
        copies = {name: value for part in _iter_copies(state) for name, value in part.items()}
        return {name: copies[name] for name in state} if keep else {}

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """Copy the state dict to the CPU tensor by tensor; tied names come together."""
        return (part if keep else {} for part in _iter_copies(self.full.full_state_dict(model)))

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load a state dict; parameters are sharded as before."""
        return self.full.load_full_state_dict(model, state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """Copy the state dict of the optimizer to the CPU."""
        state = recursively_apply(torch.Tensor.cpu, self.full.full_optimizer_state(optimizer, models))
        return state if keep else {}

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load a state dict into the optimizer; its state is sharded as the parameters are."""
        self.full.load_full_optimizer_state(optimizer, models, state)


def _iter_copies(state: StateDict) -> Iterator[StateDict]:
    """Copy tensors to the CPU one by one; names of the same memory get one copy."""
    names: dict[Any, list[str]] = {}
    for name, value in state.items():
        names.setdefault(tensor_memory(value) if isinstance(value, torch.Tensor) else id(value), []).append(
            name
        )
    for group in names.values():
        value = state[group[0]]
        yield dict.fromkeys(group, value.detach().cpu() if isinstance(value, torch.Tensor) else value)
