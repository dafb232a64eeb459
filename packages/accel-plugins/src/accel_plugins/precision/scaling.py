"""Loss scaling that keeps count of several optimizers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, final
from weakref import WeakSet

import torch

from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

    from accel_plugins.roles import StateDict

logger = logging.getLogger(__name__)


@final
class LossScaling:
    """A `GradScaler` that is updated once per iteration, however many optimizers step in it.

    All gradients of an iteration were made with one scale, so that it must not change between the steps of
    two optimizers: it is updated when all known optimizers have stepped, or else before the next loss.

    Args:
        scaler: The scaler to keep.
    """

    def __init__(self, scaler: GradScaler) -> None:
        self.scaler = scaler
        self._known: WeakSet[Optimizer] = WeakSet()
        self._unscaled: WeakSet[Optimizer] = WeakSet()
        self._stepped: WeakSet[Optimizer] = WeakSet()

    def expect(self, optimizers: Iterable[Optimizer]) -> None:
        """Make optimizers known, whose steps an update waits for.

        Raises:
            SettingsError: One has parameters in float16, in which scaled gradients would lose what scaling is
                to save.
        """
        for optimizer in optimizers:
            if self.scaler.is_enabled() and _has_half_parameters(optimizer):
                raise SettingsError(
                    f"{type(optimizer).__qualname__} trains parameters in float16 with "
                    "mixed_precision='fp16', whose loss scaling needs them in float32. Load the model in "
                    "float32; or keep it, in bfloat16 rather than float16, and use mixed_precision='no'."
                )
            self._known.add(optimizer)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        if self._stepped:
            self._update()
        return self.scaler.scale(loss)

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Divide the gradients of optimizers by the scale, unless that was done since the last update."""
        if not self.scaler.is_enabled():
            return
        for optimizer in optimizers:
            if optimizer not in self._unscaled and _has_gradients(optimizer):
                self.scaler.unscale_(optimizer)
                self._unscaled.add(optimizer)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
        """Step unless a gradient is not finite.

        Returns:
            Whether it stepped.

        Raises:
            UnsupportedError: A closure was given; it would have to scale and unscale by itself.
        """
        if not self.scaler.is_enabled() or not _has_gradients(optimizer):
            return step_plainly(optimizer, closure)
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) cannot be combined with the loss scaling of "
                "mixed_precision='fp16'; use 'bf16' or 'no'."
            )
        self.scaler.step(optimizer)
        # Fused optimizers skip inside their kernel, so this is the only place that always knows.
        found = self.scaler._found_inf_per_device(optimizer).values()  # pyright: ignore[reportPrivateUsage]
        skipped = any(inf.item() for inf in found)
        self.expect([optimizer])
        self._stepped.add(optimizer)
        if len(self._stepped) == len(self._known):
            self._update()
        return not skipped

    def state_dict(self) -> StateDict:
        """The state of the scaler between two iterations."""
        if self._stepped:
            self._update()
        return self.scaler.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Resume; without a state, as of a run in another precision, begin anew with a warning."""
        if state:
            self.scaler.load_state_dict(state)
        elif self.scaler.is_enabled():
            logger.warning(
                "The checkpoint has no state of a loss scaler: scaling begins anew at %s.",
                self.scaler.get_scale(),
            )

    def _update(self) -> None:
        self.scaler.update()
        self._stepped.clear()
        self._unscaled.clear()


def stepping_with(scaler: GradScaler | None) -> Callable[..., bool]:
    """Make a function that steps an optimizer through a scaler.

    Args:
        scaler: The scaler; `None` for plain steps.

    Returns:
        `step(optimizer, closure=None)`, which returns whether the optimizer stepped.
    """
    return step_plainly if scaler is None else LossScaling(scaler).step


def step_plainly(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
    """Step an optimizer; return True."""
    if closure is None:  # some optimizers take no closure at all
        optimizer.step()
    else:
        optimizer.step(closure)
    return True


def refuse_state(state: StateDict, name: str) -> None:
    """Warn that a loss scaler's state cannot be used by a policy without one."""
    if state:
        logger.warning(
            "The checkpoint holds the state of a loss scaler, which mixed_precision=%r does not have: "
            "it is not used.",
            name,
        )


def _has_half_parameters(optimizer: Optimizer) -> bool:
    return any(p.dtype is torch.float16 for group in optimizer.param_groups for p in group["params"])


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
