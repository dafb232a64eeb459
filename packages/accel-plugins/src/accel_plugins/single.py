"""The strategy of a run with one process."""

from __future__ import annotations

from accel_plugins.parallelism.config import ParallelismConfig, check_axes
from accel_plugins.strategy import Strategy


class SingleStrategy(Strategy):
    """Train full models in one process."""

    name = "single"

    def setup(self) -> None:
        if (axes := self.handlers.get(ParallelismConfig)) is not None:
            check_axes(axes, 1)
