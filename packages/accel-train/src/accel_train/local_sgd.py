"""Local SGD: ranks step on their local gradients, and average their parameters every few steps."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import torch

from accel_ops import collect
from accel_plugins.strategy import Feature
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from accel_train.accelerator import Accelerator


class LocalSGD:
    """Context manager in which ranks train on local gradients and average their models every few steps.

    Communication takes place every `local_sgd_steps` optimizer steps instead of every one, at the price of
    other results (https://arxiv.org/abs/1805.09767). At its end all processes have the same model again.
    `backward(num_items=…)` divides by the items of each process within it.

    Args:
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model.
        local_sgd_steps: Optimizer steps between two averages.
        enabled: Whether to do anything at all; with one process there is nothing to do.

    Raises:
        SettingsError: `local_sgd_steps` is no number of steps.
        UnsupportedError: The strategy has no gradients of single processes.

    Example:
        >>> from accel_train import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(1, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        >>> with LocalSGD(accelerator, model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.ones(10, 1):
        ...         accelerator.backward(model(batch).sum())
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         local_sgd.step()
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if isinstance(local_sgd_steps, bool) or not isinstance(local_sgd_steps, int) or local_sgd_steps < 1:
            raise SettingsError(
                f"LocalSGD(local_sgd_steps={local_sgd_steps!r}): expected a whole number above 0."
            )
        parts = accelerator._parts  # pyright: ignore[reportPrivateUsage] - of this package
        self.enabled = enabled and parts.process.use_distributed
        if self.enabled:
            parts.strategy.require(Feature.NO_SYNC, "LocalSGD()")
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._parts = parts
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Keep gradients local."""
        if self.enabled:
            self._stack.enter_context(self._parts.strategy.stepper.no_sync(self.model))
            self._stack.enter_context(self._parts.items.counting_alone())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Average the models, unless an error ends the context, and synchronise gradients again."""
        self._stack.close()
        if self.enabled and kind is None:
            self._average()

    def step(self) -> None:
        """Count an optimizer step, and average the models if it is time to.

        Call it after every optimizer step, on all processes. Micro-batches that complete no step do not
        count.
        """
        if not self._parts.gradient_state.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        own: list[Any] = [parameter.data for parameter in self.model.parameters() if parameter.requires_grad]
        averages = collect.reduce(own, "mean")
        torch._foreach_copy_(own, averages)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - documented
