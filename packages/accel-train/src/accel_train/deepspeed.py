"""The optimizer and the schedule of DeepSpeed's engine, in the form in which `prepare` returns them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_train.optimizer import AcceleratedOptimizer
from accel_train.scheduler import AcceleratedScheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine: it steps and drops gradients through the engine.

    Args:
        optimizer: The optimizer that `deepspeed.initialize` returned.
        step: Steps the engine, and returns False for a skipped step; by default the optimizer itself steps.
        discard: Drops the engine's gradients; by default the optimizer itself does.
    """

    def __init__(
        self,
        optimizer: Any,
        *,
        step: Callable[..., bool | Tensor] | None = None,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        # Its state is where the engine has put it.
        super().__init__(optimizer, device_placement=False, scaler=None, step=step)
        self._discard = discard

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop gradients if they are synchronised now.

        Args:
            set_to_none: Makes no difference: an engine has no gradients between steps.
        """
        if self._discard is None:
            super().zero_grad(set_to_none)
        elif self.gradient_state.sync_gradients:
            self._discard(self.optimizer)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The schedule of an engine, which steps it by itself whenever it updates the model.

    Args:
        scheduler: The schedule that `deepspeed.initialize` returned.
        optimizers: Its optimizer.
    """

    def __init__(
        self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]
    ) -> None:
        super().__init__(scheduler, optimizers, step_per="update")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps the schedule."""
