"""Models compute in the formats of their own parameters."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.precision.scaling import step_unscaled, warn_unused_scaler_state

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.optim import Optimizer

    from accel_plugins.bundle import Bundle
    from accel_plugins.kwargs.amp import AutocastKwargs
    from accel_plugins.roles import StateDict


@dataclass(frozen=True, slots=True, kw_only=True)
class FullPrecision:
    """The policy `"no"`: no autocast, no loss scaling.

    Args:
        device_type: The type of the device on which models compute.
    """

    device_type: str
    name: str = "no"
    scaler: None = None

    def autocast(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """A context that changes nothing, or that switches off an autocast around it if `kwargs` say so."""
        if kwargs is None or kwargs.enabled:
            return nullcontext()
        return torch.autocast(self.device_type, enabled=False)

    def convert(self, bundle: Bundle) -> Bundle:
        """Return the bundle."""
        return bundle

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss."""
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Do nothing."""

    step = staticmethod(step_unscaled)

    def state_dict(self) -> StateDict:
        """Nothing."""
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Do nothing, and say so if there is a state."""
        warn_unused_scaler_state(state, self.name)
