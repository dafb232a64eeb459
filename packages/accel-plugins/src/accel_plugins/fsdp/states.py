"""Sharded states of FSDP1 models and optimizers, as DTensors by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel

from accel_plugins.dcp.tensors import TensorShards, allocator_like, check_groups, plain_name
from accel_plugins.fsdp.roots import FsdpRoots, sharded_states, suppress_fsdp1_warnings, tied_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import StateAllocator, StateForm
    from accel_plugins.roles import StateDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1Shards:
    """Sharded state dicts of FSDP1, with the original parameters instead of the flat ones."""

    roots: FsdpRoots
    form_now: Callable[[], StateForm]
    _plain: TensorShards = field(default_factory=TensorShards, init=False)

    def form(self) -> StateForm:
        """Return the form that `save_state` writes."""
        return self.form_now()

    def model_tensors(self, model: nn.Module) -> StateDict:
        """Return the sharded state dict of the model; tied weights are one object."""
        root = self.roots.of_model(model)
        if root is None:
            return self._plain.model_tensors(model)
        with sharded_states(root):
            state = {plain_name(name): value for name, value in root.state_dict().items()}
        # FSDP1 returns tied weights as several tensors; make them one object again.
        tied = {name: first for name, first in tied_names(root).items() if {name, first} <= state.keys()}
        return state | {name: state[first] for name, first in tied.items()}

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Load a sharded state dict; one name of tied weights is enough."""
        root = self.roots.of_model(model)
        if root is None:
            self._plain.load_model(model, state, **options)
            return
        complete = dict(state)
        for name, first in tied_names(root).items():  # files have one name of tied weights
            known = next((one for one in (first, name) if one in state), None)
            if known is not None:
                complete[name] = complete[first] = state[known]
        with sharded_states(root):
            root.load_state_dict(complete, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """Return the sharded state dict of the optimizer."""
        root = self.roots.of_optimizer(optimizer, models)
        if root is None:
            return self._plain.optimizer_tensors(optimizer, models)
        with sharded_states(root):
            return FullyShardedDataParallel.optim_state_dict(root, optimizer)

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Allocate tensors sharded like FSDP1's sharded state dict."""
        root = self.roots.of_optimizer(optimizer, models)
        if root is None:
            return self._plain.state_allocator(optimizer, models)
        return allocator_like(self.model_tensors(root))

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Load a sharded state dict of the optimizer."""
        root = self.roots.of_optimizer(optimizer, models)
        if root is None:
            self._plain.load_optimizer(optimizer, models, state)
            return
        with sharded_states(root):
            now = FullyShardedDataParallel.optim_state_dict(root, optimizer)
            check_groups(*[[group["params"] for group in one["param_groups"]] for one in (state, now)])
            with suppress_fsdp1_warnings():
                loaded = FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, state)
        optimizer.load_state_dict(loaded)
