"""The strategy of a run with one process."""

from __future__ import annotations

from accel_plugins.strategy import Strategy


class SingleStrategy(Strategy):
    """Train full models in one process."""

    name = "single"
