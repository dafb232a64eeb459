"""Exact accumulation: gradients of summed losses, divided by the number of items of a whole window."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from accel_ops.dtensors import by_device
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from contextlib import AbstractContextManager

    from accel_state.runtime import Runtime
    from accel_train.step_meter import StepMeter

ItemCount: TypeAlias = "int | float | torch.Tensor"
"""A number of items: 0 or more, a tensor of one element to leave it where it was computed."""


class ItemWindow:
    """Counter of the items of summed losses since the last optimizer step, by which gradients are divided.

    A window begins with the first counted backward pass and ends with an optimizer step. Its gradients hold
    the sum over the micro-batches (over processes the strategy has averaged them) until `normalize` divides
    them by the number of items of all processes. A backward pass after that takes the division back first, so
    that a window may grow at any time.

    Attributes:
        is_open (bool): Whether items have been counted since the last optimizer step.
    """

    def __init__(
        self,
        runtime: Runtime,
        parameters: Callable[[], Iterable[torch.Tensor]],
        meter: StepMeter | None = None,
    ) -> None:
        self._runtime = runtime
        self._parameters = parameters
        self._meter = meter
        self._total: torch.Tensor | None = None
        self._count: torch.Tensor | None = None
        self._divisor: torch.Tensor | None = None
        self._holds = 0
        self._refusing: str | None = None
        self._alone = False
        self.is_open = False  # read in every step

    @property
    def is_held(self) -> bool:
        """Whether more micro-batches are certain to come."""
        return self._holds > 0

    def add(self, num_items: ItemCount) -> None:
        """Count the items of one micro-batch, before its backward pass."""
        if self._refusing is not None:
            raise UnsupportedError(
                f"backward(num_items={num_items!r}) within {self._refusing}: counting the items of a window "
                "needs every process, and one that has no batches left would be missing."
            )
        count = self._tensor(num_items)
        gradients = self._gradients()
        if self._count is not None and gradients:
            if self._divisor is not None:
                _scale(torch._foreach_mul_, gradients, self._divisor)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - documented
            count = self._count + count
        self._count, self._divisor, self.is_open = count, None, True

    def normalize(self) -> None:
        """Divide the gradients by the number of items of the window, once; do nothing without items.

        A collective in runs of several processes.
        """
        if self._count is None or self._divisor is not None:
            return
        total, processes = self._count.clone(), 1
        if not self._alone:
            self._runtime.collectives.all_reduce(total)
            processes = self._runtime.topology.world_size
        self._total = total
        # The gradients are the mean over the processes of what each has summed up.
        self._divisor = torch.where(total == 0, torch.ones_like(total), total / processes)
        _scale(torch._foreach_div_, self._gradients(), self._divisor)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - documented

    def close(self, *, used: bool = False) -> None:
        """Begin a new window."""
        if used and self._meter is not None and self._total is not None:
            self._meter.count_items(self._total, of_all_ranks=not self._alone)
        self._count = self._divisor = self._total = None
        self.is_open = False

    @contextmanager
    def hold(self, inner: AbstractContextManager[Any]) -> Generator[None]:
        """Enter another context manager, and postpone normalization until its end."""
        self._holds += 1
        try:
            with inner:
                yield
        finally:
            self._holds -= 1

    @contextmanager
    def refuse(self, where: str) -> Generator[None]:
        """Refuse to count items within the block; `where` names it in the message."""
        before, self._refusing = self._refusing, where
        try:
            yield
        finally:
            self._refusing = before

    @contextmanager
    def counting_alone(self) -> Generator[None]:
        """Count and normalize on this rank alone within the block, since its gradients are local."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def _tensor(self, num_items: ItemCount) -> torch.Tensor:
        device = self._runtime.device
        # Exact for whole numbers below 2**53, and the same dtype on all processes whatever they were given.
        dtype = torch.float32 if device.type == "mps" else torch.float64
        if isinstance(num_items, torch.Tensor):
            if num_items.numel() != 1:
                raise ValueError(
                    f"backward(num_items=…) got a tensor of shape {tuple(num_items.shape)}; give one number, "
                    "such as `(labels != -100).sum()`."
                )
            return num_items.detach().to(device=device, dtype=dtype).reshape(())
        if isinstance(num_items, bool) or not num_items >= 0:
            raise ValueError(f"backward(num_items={num_items!r}): give the number of items, 0 or more.")
        return torch.tensor(num_items, device=device, dtype=dtype)

    def _gradients(self) -> list[torch.Tensor]:
        known = {id(one): one for one in self._parameters()}
        if not known:
            raise ValueError(
                "backward(num_items=…) divides the gradients of prepared models and optimizers, and nothing "
                "was prepared; pass them through accelerator.prepare() first."
            )
        return [one.grad for one in known.values() if one.grad is not None]


def _scale(operation: Callable[..., object], gradients: list[torch.Tensor], number: torch.Tensor) -> None:
    for group in by_device(gradients):
        operation(group, number.to(group[0].device))
