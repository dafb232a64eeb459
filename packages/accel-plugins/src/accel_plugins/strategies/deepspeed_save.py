"""Weights and optimizer state of an engine, whole: as one process would have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.modules import extract_model_from_parallel
from accel_plugins.deepspeed.state import EngineState
from accel_plugins.strategies.replicated import ReplicatedPersister

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict
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

    def save_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Write the weights as they are updated, in float32, on the main process."""
        is_main = self.runtime.topology.is_main
        state = self.full_state_dict(model, keep=is_main, exact=True)
        if is_main:
            torch.save(state, directory / f"pytorch_model_{index}.bin")

    def load_model(self, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back."""
        path = directory / f"pytorch_model_{index}.bin"
        self.load_full_state_dict(model, torch.load(path, map_location="cpu", weights_only=True))

    def save_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Write the state of the optimizer on the main process."""
        is_main = self.runtime.topology.is_main
        state = self.full_optimizer_state(optimizer, [model], keep=is_main)
        if is_main:
            torch.save(state, directory / f"optimizer_{index}.bin")

    def load_optimizer(self, optimizer: Optimizer, model: nn.Module, directory: Path, index: int) -> None:
        """Read it back."""
        path = directory / f"optimizer_{index}.bin"
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.load_full_optimizer_state(optimizer, [model], state)

    def full_state_dict(self, model: nn.Module, *, keep: bool = True, exact: bool = False) -> StateDict:
        """The whole state dict, under the names of the model itself.

        Args:
            model: Prepared or not.
            keep: Whether this rank needs it.
            exact: Whether weights come in float32, as they are updated, where the model has 16-bit ones.
        """
        state = self._state_of(model)
        return self._plain.full_state_dict(model) if state is None else state.weights(keep=keep, exact=exact)

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
        return EngineState(self.stepper.wrapper.engine, self.stepper.wrapper.groups).optimizer(keep=keep)

    def load_full_optimizer_state(
        self, optimizer: Optimizer, models: Sequence[nn.Module], state: Mapping[str, Any]
    ) -> None:
        """Load such a state dict."""
        del optimizer, models
        EngineState(self.stepper.wrapper.engine, self.stepper.wrapper.groups).load_optimizer(state)

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
