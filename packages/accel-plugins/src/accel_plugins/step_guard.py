"""Steps that are skipped, on all ranks alike, if gradients are not finite or too large (`StepGuard`)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from accel_plugins.precision import decides_on_device
from accel_plugins.strategy import Feature
from accel_state.errors import UnsupportedError
from accel_state.streams import device_streams, pinned_if_possible

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.kwargs import StepGuard
    from accel_plugins.strategy import Strategy


def guard_steps(strategy: Strategy, guard: StepGuard) -> None:
    """Make the optimizers of a strategy skip steps as `guard` says.

    Raises:
        UnsupportedError: The strategy's engine steps itself, or losses are scaled.
    """
    strategy.require(Feature.STEP_GUARD, repr(guard))
    precision = strategy.precision
    if precision.scaling is not None:
        raise UnsupportedError(
            f"{guard!r} with mixed_precision={precision.name!r}: its loss scaling skips steps with gradients "
            "that are not finite. Use 'bf16' or 'no', or remove it."
        )
    precision.scaling = steps = GuardedSteps(strategy, guard)
    precision.step = steps.step


@final
class GuardedSteps:
    """Judge each step by the norm of its gradients, without a history; it is called as `LossScaling` is.

    Flags are 0-d float32 tensors on the device, 1 where the step is skipped, and the same on all ranks.
    """

    def __init__(self, strategy: Strategy, guard: StepGuard) -> None:
        self._strategy, self._guard = strategy, guard
        self._flags: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._skipped: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        # Copies of the counts of skipped steps on the host, with the event after which they can be read.
        self._copies: WeakKeyDictionary[Optimizer, tuple[Tensor, torch.Event | None]] = WeakKeyDictionary()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss; its gradients will have another norm than those that were measured before."""
        self._flags.clear()
        return loss

    def unscale(self, optimizers: Iterable[Optimizer]) -> None:
        """Measure gradients that are about to be clipped, once after each backward pass."""
        runtime, limit = self._strategy.runtime, self._guard.max_norm
        for optimizer in optimizers:
            if optimizer in self._flags:
                continue
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            # It is None for engines that clip later, which lack the feature.
            norm: Any = self._strategy.clip_grad_norm(parameters, math.inf)
            largest = torch.finfo(norm.dtype).max if limit is None else limit
            flag = (norm <= largest).logical_not().to(runtime.device, torch.float32)
            runtime.collectives.all_reduce(flag, op="max")  # also where a program left gradients local
            self._flags[optimizer] = flag

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step unless the gradients are not finite or too large.

        Returns:
            Whether it stepped; a 0-d tensor on the device where the device decides.

        Raises:
            FloatingPointError: Too many earlier steps in a row were skipped.
            UnsupportedError: There is a closure, which may step several times.
        """
        if closure is not None:
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) cannot be combined with {self._guard!r}: the "
                "gradients are computed within the step."
            )
        # 1. Give up if the steps before this one were skipped. The host reads the count at a fixed step, so
        # that all ranks raise there. It waits for the step before, while the device has the work of a whole
        # forward and backward pass.
        copied, event = self._copies.get(optimizer, (None, None))
        if event is not None and not event.query():
            event.synchronize()
        if copied is not None and copied.item() >= self._guard.give_up_after:
            raise FloatingPointError(
                f"{type(optimizer).__name__} skipped {int(copied.item())} steps in a row, whose gradients "
                f"were not finite or too large: {self._guard!r} gives up. Its parameters and state are those "
                "before these steps."
            )
        # 2. Step, on the device if the optimizer's kernel reads the attribute `found_inf` there.
        self.unscale([optimizer])
        flag, stepped = self._flags.pop(optimizer), True
        if (
            decides_on_device(optimizer)
            and "grad_scaler" not in inspect.signature(optimizer.step).parameters
            and all(p.device == flag.device for group in optimizer.param_groups for p in group["params"])
        ):
            fused: Any = optimizer
            fused.found_inf = flag
            try:
                fused.step()
            finally:
                del fused.found_inf
            stepped = flag == 0
        elif stepped := not flag.item():
            optimizer.step()
        self._count(optimizer, flag)
        return stepped

    def _count(self, optimizer: Optimizer, flag: Tensor) -> None:
        """Count skipped steps in a row, and begin to copy the count to the host."""
        count = self._skipped[optimizer] = (self._skipped.get(optimizer, 0.0) + 1) * flag
        streams = device_streams(flag.device)
        if streams is None:
            self._copies[optimizer] = count, None
            return
        copied, _ = self._copies.get(optimizer, (None, None))  # read by now, so that its memory is free
        if copied is None:
            buffer = pinned_if_possible(streams, count.nbytes)
            copied = torch.zeros(1, device="cpu") if buffer is None else buffer.view(count.dtype)
        streams.copy_(copied, count.view(1))
        event = streams.new_event()
        event.record(streams.current_stream())
        self._copies[optimizer] = copied, event
