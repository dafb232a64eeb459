"""A learning rate scheduler that moves only when the optimizer has, and keeps pace with many processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import OneCycleLR

from accel_state.gradient_state import GradientState
from accel_state.runtime import current_or_single

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from accel_train.optimizer import AcceleratedOptimizer


class AcceleratedScheduler:
    """A scheduler that steps when its optimizers have stepped, once for every process.

    A schedule is written for the number of batches of the whole data set. Unless batches are split, every
    optimizer step consumes one batch per process, and the schedule advances by as many steps. While
    gradients are accumulated, and when an optimizer skipped its step because gradients were not finite,
    it stays where it is.

    Args:
        scheduler: The scheduler to wrap.
        optimizers: The prepared optimizer, or optimizers, whose learning rate it sets.
        step_with_optimizer: Whether to follow the optimizers as described. `False` forwards every `step`
            as it is.
        split_batches: Whether a batch of the data loader is divided among the processes, so that one
            optimizer step is one step of the schedule.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        >>> scheduler = AcceleratedScheduler(schedule, [])
        >>> _ = optimizer.step(), scheduler.step()
        >>> scheduler.get_last_lr()
        [0.5]
    """

    def __init__(
        self,
        scheduler: LRScheduler,
        optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer],
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers: Sequence[AcceleratedOptimizer] = (
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]  # pyright: ignore[reportAttributeAccessIssue]
        )
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        self._steps_per_update = 1 if split_batches else current_or_single().topology.world_size

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers have stepped; arguments go to the wrapped scheduler."""
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        if not self.gradient_state.sync_gradients:
            if self.gradient_state.adjust_scheduler:
                scheduler._step_count += 1  # pyright: ignore[reportPrivateUsage] - counts calls, the schedule stays
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                return
        for _ in range(self._steps_per_update):
            # PyTorch raises on a step past the end, and one update may be several steps.
            if isinstance(scheduler, OneCycleLR) and scheduler.last_epoch >= scheduler.total_steps:
                return
            scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rate of every parameter group, as last computed."""
        return self.scheduler.get_last_lr()  # pyright: ignore[reportReturnType] - a tensor where the user gave one

    def get_lr(self) -> list[float]:
        """The wrapped scheduler's `get_lr`."""
        return self.scheduler.get_lr()  # pyright: ignore[reportReturnType]

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """The wrapped scheduler's `print_lr`, where the installed PyTorch still has it."""
        self.scheduler.print_lr(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped scheduler's state."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped scheduler's state."""
        self.scheduler.load_state_dict(state_dict)
