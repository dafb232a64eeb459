"""The optimizer and the schedule that `prepare` returns: they step when gradients are synchronised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from accel_ops.tree import send_to_device
from accel_plugins.precision import LossScaling, step_unscaled
from accel_state import runtime
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.errors import SettingsError
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

logger = get_logger(__name__)


def _forward(name: str, doc: str) -> Any:
    """Return a property that forwards to an attribute of the wrapped optimizer."""

    def write(self: AcceleratedOptimizer, value: Any) -> None:
        setattr(self.optimizer, name, value)

    return property(lambda self: getattr(self.optimizer, name), write, doc=doc)


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` act only when gradients are synchronised.

    Within `Accelerator.accumulate`, calls between synchronisations do nothing, so that a training loop
    can call both for every micro-batch. Everything else is forwarded to the wrapped optimizer.

    Args:
        optimizer: The optimizer to wrap, available as `.optimizer`.
        device_placement: Whether to move the optimizer's state to the device of its parameters.
        scaler: The loss scaler to step through, where float16 is used without an `Accelerator`.
        step: Steps the optimizer, as `Strategy.step`; returns False for a skipped step. By
            default, the optimizer's own step, through `scaler` if there is one.
        window: Counter of the items of summed losses since the last step, by whose number of all processes
            gradients are divided (`accel_train.step.ItemWindow`).
        discard: Drops gradients that an engine has; by default `zero_grad` of the optimizer does.

    Attributes:
        num_steps (int): Number of `step` calls with synchronised gradients.

    Example:
        >>> weight = torch.ones(1, requires_grad=True)
        >>> optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> weight.item()
        0.5
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: GradScaler | None = None,
        *,
        step: Callable[..., bool | torch.Tensor] | None = None,
        window: Any = None,
        discard: Callable[[Any], None] | None = None,
    ) -> None:
        # Optimizer.__init__ would create a second set of groups and state; both are the wrapped optimizer's.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        self._accumulation = self.gradient_state.accumulation  # of the `Accelerator` that was used last
        if step is None and scaler is not None:
            step = LossScaling(scaler).step
        self._step = None if step is step_unscaled else step  # None: the optimizer's own
        self._window = window
        self._discard = discard
        self._stepped: bool | torch.Tensor = True
        self._is_to_clear = False  # whether it has stepped with gradients that were not cleared yet
        self.num_steps = 0
        if device_placement and any(
            isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
            for parameter, values in optimizer.state.items()
            for value in values.values()
        ):
            # Loading its own state is how an optimizer moves it to its parameters.
            optimizer.load_state_dict(optimizer.state_dict())

    def _switch_parameters(self, parameters_map: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Replace parameters in the groups; parameters that the mapping lacks stay."""
        for group in self.optimizer.param_groups:
            group["params"] = [parameters_map.get(parameter, parameter) for parameter in group["params"]]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the wrapped optimizer if gradients are synchronised now.

        Args:
            closure: Recomputes the loss, as for any PyTorch optimizer.

        Returns:
            The first result of `closure`; `None` without a closure, or if nothing was done.
        """
        state = self.gradient_state
        if state.accumulation is not self._accumulation:
            state.activate(self._accumulation)
        if not state.sync_gradients:
            return None
        state.window.has_gradients, self._is_to_clear = False, True
        self.num_steps += 1
        window = self._window
        if window is not None and window.is_open:
            window.normalize()
            window.close(used=True)
        if closure is None:
            if self._step is None:
                self.optimizer.step()
            else:
                self._stepped = self._step(self.optimizer, None)
            return None
        losses: list[float] = []

        def record_loss() -> float:
            losses.append(closure())
            return losses[-1]

        self._stepped = (self._step or step_unscaled)(self.optimizer, record_loss)
        return losses[0] if losses else None

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clear the gradients if they are synchronised now.

        Gradients of earlier micro-batches remain until `step`, or until a backward pass of the micro-batch
        that completes them: a loop may clear gradients at its beginning, too.

        Args:
            set_to_none: Passed to the wrapped optimizer unless `None`. Engines need none.
        """
        state = self.gradient_state
        if state.accumulation is not self._accumulation:
            state.activate(self._accumulation)
        earlier = state.window
        if state.sync_gradients:
            if earlier.has_gradients and not earlier.ran_backward:
                return
        elif earlier.ran_backward or not self._is_to_clear:
            return
        self._is_to_clear = False
        window = self._window
        if window is not None and window.is_open:
            window.close()
        if self._discard is not None:
            self._discard(self.optimizer)
        elif set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because of its gradients."""
        self._stepped = bool(self._stepped)  # the host waits for the device here, and not in `step`
        return not self._stepped

    @property
    def _is_overflow(self) -> bool:
        """As `step_was_skipped`; scripts that skip a step set it, so that schedulers do not advance."""
        return self.step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, skipped: bool) -> None:
        self._stepped = not skipped

    state: Any = _forward("state", "The wrapped optimizer's state, by parameter.")
    param_groups: list[dict[str, Any]] = _forward("param_groups", "The wrapped optimizer's parameter groups.")
    defaults: dict[str, Any] = _forward("defaults", "The wrapped optimizer's defaults.")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)

    # Schedule-free optimizers share no base class: the methods themselves are their interface.

    def train(self) -> Any:
        """Switch a schedule-free optimizer to training mode."""
        return getattr(self.optimizer, "train", lambda: None)()

    def eval(self) -> Any:
        """Switch a schedule-free optimizer to evaluation mode."""
        return getattr(self.optimizer, "eval", lambda: None)()

    def __getattr__(self, name: str) -> Any:
        # Hooks and methods of particular optimizers. copy and pickle look names up before `optimizer` is set.
        if name == "optimizer":
            raise AttributeError(name)
        return AcceleratorState() if name == "accelerator_state" else getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("step", None)  # schedulers of torch put a counter around the method
        del state["_accumulation"]  # that of the process which unpickles it
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._accumulation = self.gradient_state.accumulation


def move_to_device(state: Any, device: torch.device | str) -> Any:
    """Move the tensors of an optimizer's state, however nested, to a device.

    Args:
        state: Dicts, lists and tuples of tensors and anything else.
        device: The device.

    Example:
        >>> move_to_device({"step": 1, "mean": torch.zeros(2)}, "cpu")
        {'step': 1, 'mean': tensor([0., 0.])}
    """
    return send_to_device(state, device)


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap a function, such as the inner optimizer's step, to record its calls on a prepared optimizer.

    Args:
        accelerated_optimizer: The optimizer whose `_accelerate_step_called` becomes true.
        method: The function to wrap.

    Example:
        >>> optimizer = AcceleratedOptimizer(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5))
        >>> patch_optimizer_step(optimizer, lambda: "stepped")(), optimizer._accelerate_step_called
        ('stepped', True)
    """

    @wraps(method)
    def patched(*args: Any, **kwargs: Any) -> Any:
        vars(accelerated_optimizer)["_accelerate_step_called"] = True
        return method(*args, **kwargs)

    return patched


StepPer: TypeAlias = Literal["process", "update", "sample"]
"""The unit of one step of a schedule."""


class AcceleratedScheduler:
    """Scheduler wrapper that steps when its optimizers have stepped, by a selectable clock.

    While gradients are accumulated, and when an optimizer skipped its step because gradients were not finite,
    the schedule stays where it is. Otherwise it advances by `step_per`:

    - `"process"`, the documented default: as many steps as there are processes, since the schedule was
      written for the batches of one process, and each process has consumed one; one step if batches are
      split.
    - `"update"`: one step per optimizer step, on any number of processes.
    - `"sample"`: as many steps as all processes have read samples since the last optimizer step. A
      `ReduceLROnPlateau` counts no samples: each metric is one observation.

    Args:
        scheduler: The scheduler to wrap.
        optimizers: The prepared optimizer, or optimizers, whose learning rate it sets.
        step_with_optimizer: Whether to follow the optimizers as described. `False` forwards every `step`
            unchanged.
        split_batches: Whether each batch of the data loader is sharded across ranks.
        step_per: The unit of one step of the schedule. `None` is `"process"`, with a log message at level
            INFO if that is more than one step.
        num_shards: Number of processes that read different batches; all if `None`.

    Raises:
        SettingsError: The clock is unknown, or is passed together with `step_with_optimizer=False`.

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
                f"step_per={step_per!r} has no effect with step_with_optimizer=False: every call of "
                "step() is one step of the schedule. Remove one of the two."
            )
        self.scheduler = scheduler
        self.optimizers: Sequence[AcceleratedOptimizer] = (
            optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]  # pyright: ignore[reportAttributeAccessIssue]
        )
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self.gradient_state = GradientState()
        all_ranks = runtime.active.topology.world_size if num_shards is None else num_shards
        processes = 1 if split_batches else all_ranks
        self._steps_per_update = processes if step_per in {None, "process"} else 1
        self._counts_samples = step_per == "sample" and not isinstance(scheduler, ReduceLROnPlateau)
        self._samples = 0
        if step_per is None and step_with_optimizer and processes > 1:
            logger.info(
                "The learning rate schedule advances %d steps per optimizer step, one for each process, "
                "because schedules are assumed to be written for the batches of one process. If it is "
                "written for optimizer steps, pass Accelerator(step_scheduler_per='update'); 'process' "
                "keeps this behaviour and logs nothing.",
                processes,
            )

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule, if the optimizers have stepped; arguments go to the wrapped scheduler.

        Raises:
            ValueError: Steps are counted in samples, and no loader knows their number.
        """
        scheduler = self.scheduler
        if not self.step_with_optimizer:
            scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if self._counts_samples:
            loader = state.active_dataloader
            if loader is None or not loader.counts_samples:
                problem = "no prepared loader is being iterated over. Call step() within its loop"
                if loader is not None:
                    kind = type(loader).__qualname__
                    problem = f"{kind} has batches of another size each, as its batch sampler says"
                raise ValueError(
                    f"A schedule with step_per='sample' cannot count samples: {problem}, or use 'update'."
                )
            in_last = loader.remainder if loader.end_of_dataloader else 0
            self._samples += in_last if in_last > 0 else loader.total_batch_size
        if not state.sync_gradients:
            return
        for optimizer in self.optimizers:
            if optimizer.step_was_skipped:
                self._samples = 0
                return
        steps, self._samples = self._samples if self._counts_samples else self._steps_per_update, 0
        if self._counts_samples and type(scheduler) is LambdaLR:
            # LambdaLR computes its rates only from the position, and thousands of steps would be slow.
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


def is_lomo(optimizer: object) -> bool:
    """Return whether an optimizer is from lomo-optim: it steps in the backward pass."""
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)


def check_clock(step_per: str | None, argument: str) -> None:
    """Refuse an unknown clock."""
    if step_per is not None and step_per not in get_args(StepPer):
        raise SettingsError(
            f"{argument}={step_per!r} is not a clock of a schedule. Use 'process' (one step for every "
            "process), 'update' (one step per optimizer step) or 'sample' (one for every sample)."
        )


def without_wrapper(prepared: Any) -> Any:
    """Return the optimizer or schedule that `prepare` has wrapped; anything else as it is."""
    if isinstance(prepared, AcceleratedOptimizer):
        return prepared.optimizer
    return prepared.scheduler if isinstance(prepared, AcceleratedScheduler) else prepared
