"""An optimizer wrapper that steps only at the end of an accumulation window."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.move import send_to_device
from accel_plugins.precision import LossScaling, step_unscaled
from accel_state.accelerator_state import AcceleratorState
from accel_state.gradient_state import GradientState

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp.grad_scaler import GradScaler

    from accel_train.token_normalizer import ItemWindow


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
    """Record on a prepared optimizer that a function, such as the step of the wrapped one, was called.

    Args:
        accelerated_optimizer: Whose `_accelerate_step_called` becomes true.
        method: The function.

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


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer whose `step` and `zero_grad` act only when gradients are synchronised.

    Within `Accelerator.accumulate`, calls between synchronisations do nothing, so that a training loop
    can call both for every micro-batch. Anything else is the wrapped optimizer's.

    Args:
        optimizer: The optimizer to wrap, available as `.optimizer`.
        device_placement: Whether to move the optimizer's state to where its parameters are.
        scaler: The loss scaler to step through, where float16 is used without an `Accelerator`.
        step: How to step, as of a strategy's `Stepper`; returns False for a skipped step. By default
            the optimizer itself, through `scaler` where there is one.
        window: The items that are counted until the next step, which ends the window.

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
        window: ItemWindow | None = None,
    ) -> None:
        # Optimizer.__init__ would make a second set of groups and state: all of that is the wrapped one's.
        self.optimizer = optimizer
        self.scaler = scaler
        self.device_placement = device_placement
        self.gradient_state = GradientState()
        if step is None and scaler is not None:
            step = LossScaling(scaler).step
        self._step = None if step is step_unscaled else step  # None: the optimizer's own
        self._window = window
        self._stepped: bool | torch.Tensor = True
        self.num_steps = 0
        if device_placement and _state_lags_behind(optimizer):
            # Loading its own state is how an optimizer moves it to its parameters.
            optimizer.load_state_dict(optimizer.state_dict())

    @property
    def accelerator_state(self) -> AcceleratorState:
        """The state of this process."""
        return AcceleratorState()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Step the wrapped optimizer if gradients are synchronised now.

        Args:
            closure: Computes the loss anew, as for any PyTorch optimizer.

        Returns:
            What `closure` returned first; `None` without one, or if nothing was done.
        """
        if not self.gradient_state.sync_gradients:
            return None
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

        def recorded() -> float:
            losses.append(closure())
            return losses[-1]

        self._stepped = (self._step or step_unscaled)(self.optimizer, recorded)
        return losses[0] if losses else None

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Clear the gradients if they are synchronised now.

        Args:
            set_to_none: Passed on if given.
        """
        if not self.gradient_state.sync_gradients:
            return
        window = self._window
        if window is not None and window.is_open:
            window.close()
        if set_to_none is None:
            self.optimizer.zero_grad()
        else:
            self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because gradients were not finite."""
        self._stepped = bool(self._stepped)  # only now does the host wait, where the device decides
        return not self._stepped

    @property
    def _is_overflow(self) -> bool:
        """The same, which scripts set where they skip a step themselves; schedulers then stay."""
        return self.step_was_skipped

    @_is_overflow.setter
    def _is_overflow(self, skipped: bool) -> None:
        self._stepped = not skipped

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's parameter groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The wrapped optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state dict."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> Any:
        """Switch a schedule-free optimizer to training mode."""
        return self._set_mode("train")

    def eval(self) -> Any:
        """Switch a schedule-free optimizer to evaluation mode."""
        return self._set_mode("eval")

    def _set_mode(self, mode: str) -> Any:
        # Schedule-free optimizers share no base class: the method itself is their interface.
        change = getattr(self.optimizer, mode, None)
        return None if change is None else change()

    def __getattr__(self, name: str) -> Any:
        # Hooks and whatever a particular optimizer adds. Also asked by copy and pickle, before there is one.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.pop("step", None)  # where a scheduler has put a counter around it
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _state_lags_behind(optimizer: torch.optim.Optimizer) -> bool:
    return any(
        isinstance(value, torch.Tensor) and value.dim() > 0 and value.device != parameter.device
        for parameter, values in optimizer.state.items()
        for value in values.values()
    )
