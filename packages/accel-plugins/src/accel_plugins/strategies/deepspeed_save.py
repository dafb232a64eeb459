"""Weights and optimizer state of an engine, whole: as one process would have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.deepspeed.native_checkpoint import load_engine, save_engine
from accel_plugins.deepspeed.state import EngineState
from accel_plugins.strategies.replicated import ReplicatedPersister

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import StateAllocator
    from accel_plugins.roles import StateDict, Write
    from accel_plugins.strategies.deepspeed_step import DeepSpeedStepper
    from accel_state.runtime import Runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedPersister:
    """Brings together what the ranks have, and divides it again.

    Args:
        runtime: Of this process.
        stepper: Knows the engine that is trained.
    """

    runtime: Runtime
    stepper: DeepSpeedStepper

    def save_model(self, model: nn.Module, directory: Path, index: int, *, write: Write = torch.save) -> None:
        """Let the engine write its own folder, in which its optimizer is, too."""
        owner = self.stepper.owner_of(model)
        if owner is None:
            self._plain.save_model(model, directory, index, write=write)
        else:
            save_engine(owner.engine, directory, index, write=write)

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back, also if it was divided otherwise."""
        owner = self.stepper.owner_of(model)
        if owner is None:
            self._plain.load_model(model, directory, index)
        else:
            load_engine(owner.engine, EngineState(owner.engine, owner.groups), directory, index)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        directory: Path,
        index: int,
        *,
        write: Write = torch.save,
    ) -> None:
        """Do nothing: it is in the folder of the model."""

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Do nothing: it came with the model."""

    def full_state_dict(self, model: nn.Module, *, keep: bool = True, exact: bool = False) -> StateDict:
        """The whole state dict, under the names of the model itself.

        Args:
            model: Prepared or not.
            keep: Whether this rank needs it.
            exact: Whether weights come in float32, as they are updated, where the model has 16-bit ones.
        """
        state = self._state_of(model)
        return self._plain.full_state_dict(model) if state is None else state.weights(keep=keep, exact=exact)

    def iter_full_state_dict(self, model: nn.Module, *, keep: bool = True) -> Iterator[StateDict]:
        """One tensor after the other where they are divided; tied ones together."""
        state = self._state_of(model)
        return self._plain.iter_full_state_dict(model) if state is None else state.iter_weights(keep=keep)

    def load_full_state_dict(self, model: nn.Module, state: Mapping[str, Any], **options: Any) -> Any:
        """Load such a state dict."""
        engine = self._state_of(model)
        if engine is None:
            return self._plain.load_full_state_dict(model, state, **options)
        return engine.load_weights(state, **options)

    def full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], *, keep: bool = True
    ) -> StateDict:
        """The state dict that the optimizer would have in a run of one process."""
        del optimizer, models  # there is one
        return self.state.optimizer(keep=keep)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load such a state dict."""
        del optimizer, models
        self.state.load_optimizer(state)

    @property
    def state(self) -> EngineState:
        """What the engine that is trained has."""
        return EngineState(self.stepper.wrapper.engine, self.stepper.wrapper.groups)

    @property
    def _plain(self) -> ReplicatedPersister:
        return ReplicatedPersister(is_main=self.runtime.topology.is_main)

    def _state_of(self, model: nn.Module) -> EngineState | None:
        owner = self.stepper.owner_of(model)
        if owner is not None:
            return EngineState(owner.engine, owner.groups)
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        divided = any("ds_id" in vars(parameter) for parameter in core.parameters())
        return EngineState(None, (), module=core) if divided else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedShards:
    """Says that the engine writes its own folder, and takes whole what others have written.

    Args:
        persister: Knows how.
    """

    persister: DeepSpeedPersister

    def form(self) -> StateForm:
        """The engine's own."""
        return StateForm.NATIVE

    def model_tensors(self, model: nn.Module) -> StateDict:
        """The whole state dict; weights in float32, as they are updated."""
        return self.persister.full_state_dict(model, exact=True)

    def load_model(self, model: nn.Module, state: StateDict, **options: Any) -> None:
        """Take it back."""
        self.persister.load_full_state_dict(model, state, **options)

    def optimizer_tensors(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateDict:
        """The state dict of the optimizer, where names stand for parameters."""
        state = self.persister.full_optimizer_state(optimizer, models)
        return self.persister.state.named(state)

    def state_allocator(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> StateAllocator:
        """Every rank reads whole tensors."""
        del optimizer, models
        return _full

    def load_optimizer(self, optimizer: Optimizer, models: Sequence[nn.Module], state: StateDict) -> None:
        """Take it back."""
        del optimizer, models
        self.persister.state.load_named_optimizer(state)


def _full(name: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    del name
    return torch.empty(shape, dtype=dtype)
