"""A learning rate scheduler that steps only when its optimizers have, by a selectable clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from accel_state.errors import SettingsError
from accel_state.gradient_state import GradientState
from accel_state.logging import get_logger
from accel_state.runtime import current_or_single

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim.lr_scheduler import LRScheduler

    from accel_train.optimizer import AcceleratedOptimizer

logger = get_logger(__name__)


StepPer: TypeAlias = Literal["process", "update", "sample"]
"""What one step of a schedule stands for."""


class AcceleratedScheduler:
    """Scheduler wrapper that steps when its optimizers have stepped, by a selectable clock.

    While gradients are accumulated, and when an optimizer skipped its step because gradients were not finite,
    the schedule stays where it is. Otherwise it advances, as `step_per` says:

    - `"process"`, the documented default: as many steps as there are processes, since every one of them
      has used up a batch of a data set for whose batches the schedule was written; one step if batches are
      split.
    - `"update"`: one step per optimizer step, on any number of processes.
    - `"sample"`: as many steps as all processes have read samples since the last optimizer step. A
      `ReduceLROnPlateau` counts no samples: each metric is one observation.

    Args:
        scheduler: The scheduler to wrap.
        optimizers: The prepared optimizer, or optimizers, whose learning rate it sets.
        step_with_optimizer: Whether to follow the optimizers as described. `False` forwards every `step`
            as it is.
        split_batches: Whether each batch of the data loader is sharded across ranks.
        step_per: What one step of the schedule stands for. `None` is `"process"`, and says so in the log,
            at level INFO, where that is more than one step.
        num_shards: How many processes have batches of their own; all if `None`.

    Raises:
        SettingsError: There is no such clock, or it is given along with `step_with_optimizer=False`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        >>> scheduler = AcceleratedScheduler(schedule, [], step_per="update")
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
        *,
        step_per: StepPer | None = None,
        num_shards: int | None = None,
    ) -> None:
        check_clock(step_per, "step_per")
        if step_per is not None and not step_with_optimizer:
            raise SettingsError(
                f"step_per={step_per!r} has no effect with step_with_optimizer=False, by which every call of "
                "step() is one step of the schedule; leave one of the two out."
            )
        self.scheduler = scheduler
        self.optimizers: Sequence[AcceleratedOptimizer] = (
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]  # pyright: ignore[reportAttributeAccessIssue]
        )
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        all_ranks = current_or_single().topology.world_size if num_shards is None else num_shards
        processes = 1 if split_batches else all_ranks
        self._steps_per_update = processes if step_per in {None, "process"} else 1
        self._counts_samples = step_per == "sample" and not isinstance(scheduler, ReduceLROnPlateau)
        self._steps_once = (
            self._steps_per_update == 1 and not self._counts_samples and not isinstance(scheduler, OneCycleLR)
        )
        self._samples = 0
        if step_per is None and step_with_optimizer and processes > 1:
            logger.info(
                "The learning rate schedule advances %d steps per optimizer step, one for each process, "
                "because a schedule is taken to be written for the batches of one process. If it is written "
                "for optimizer steps, pass Accelerator(step_scheduler_per='update'); 'process' keeps it "
                "as it is and says nothing.",
                processes,
            )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers have stepped; arguments go to the wrapped scheduler.

        Raises:
            ValueError: Samples are to be counted where no loader says how many there are.
        """
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if self._counts_samples:
            self._samples += samples_per_step(state.active_dataloader)
        if not state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                self._samples = 0
                return
        if self._steps_once and not args and not kwargs:
            scheduler.step()
        else:
            self._advance(*args, **kwargs)

    def _advance(self, *args: Any, **kwargs: Any) -> None:
        """Make the steps of one update, of which there may be several, or none."""
        scheduler = self.scheduler
        steps, self._samples = self._samples if self._counts_samples else self._steps_per_update, 0
        if self._counts_samples and type(scheduler) is LambdaLR:
            # It computes its rates from the position alone, and thousands of steps would take their time.
            scheduler.last_epoch += steps - 1
            steps = min(steps, 1)
        for _ in range(steps):
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


def check_clock(step_per: str | None, argument: str) -> None:
    """Refuse an unknown clock."""
    if step_per is not None and step_per not in get_args(StepPer):
        raise SettingsError(
            f"{argument}={step_per!r} is no clock of a schedule; use 'process' (one step for every process), "
            "'update' (one step per optimizer step) or 'sample' (one for every sample)."
        )


def samples_per_step(loader: Any | None) -> int:
    """Return the number of samples of the last batch of a loader, over all ranks."""
    problem = "no prepared loader is being iterated over; call step() within the loop over one"
    if loader is not None:
        if loader.counts_samples:
            in_last = loader.remainder if loader.end_of_dataloader else 0
            return in_last if in_last > 0 else loader.total_batch_size
        problem = f"{type(loader).__qualname__} has batches of another size each, as its batch sampler says"
    raise ValueError(f"A schedule with step_per='sample' cannot count samples: {problem}, or use 'update'.")
