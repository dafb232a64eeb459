"""The strategy of a run with one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accel_plugins.parallelism.config import check_axes
from accel_plugins.strategy import PrecisionPolicy, Strategy

if TYPE_CHECKING:
    from accel_state.runtime import Runtime
    from accel_state.settings.model import Settings


class SingleStrategy(Strategy):
    """Train full models in one process."""

    name = "single"

    def __init__(
        self, settings: Settings, runtime: Runtime, precision: PrecisionPolicy, handlers: Mapping[type, Any]
    ) -> None:
        super().__init__(settings, runtime, precision, handlers)
        check_axes(handlers, 1)
