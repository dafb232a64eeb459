"""Average gradients over the ranks of XLA devices, within the graph that is recorded."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from weakref import WeakSet

from accel_plugins.xla.library import xla_module

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import nn


class GradientAverage:
    """Averages the gradients of models after backward passes.

    Gradients that are averages already stay as they are, so several backward passes may run before a step.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._scale = 1.0 / world_size
        self._models: WeakSet[nn.Module] = WeakSet()
        self._is_local = False

    def add(self, model: nn.Module) -> None:
        """Average the gradients of a model from now on."""
        self._models.add(model)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Generator[None]:
        """Leave gradients local in backward passes within the block."""
        del model
        before, self._is_local = self._is_local, True
        try:
            yield
        finally:
            self._is_local = before

    @contextmanager
    def around_backward(self) -> Generator[None]:
        """Average gradients at the end of the block."""
        yield
        gradients = {
            id(parameter): parameter.grad
            for model in self._models
            for parameter in model.parameters()
            if parameter.grad is not None
        }
        if gradients and not self._is_local:
            xla_module("core.xla_model").all_reduce("sum", [*gradients.values()], scale=self._scale)
