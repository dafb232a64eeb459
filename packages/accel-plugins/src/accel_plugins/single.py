"""The strategy of a run with one process."""

from __future__ import annotations

from accel_plugins.parallelism.config import check_axes
from accel_plugins.strategy import Strategy


class SingleStrategy(Strategy):
    """Train full models in one process."""

    name = "single"

    def setup(self) -> None:
        check_axes(self.handlers, 1)
