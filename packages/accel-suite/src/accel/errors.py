"""The errors that accel raises on purpose.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.errors import (
        AccelError, DistributedOperationException, MissingDependencyError, SettingsError,
        StalledCollectiveError, TrackerError, UnsupportedError,
    )

__all__ = [
    "AccelError", "DistributedOperationException", "MissingDependencyError", "SettingsError",
    "StalledCollectiveError", "TrackerError", "UnsupportedError",
]

_EXPORTS = {
    **dict.fromkeys((
        "AccelError", "DistributedOperationException", "MissingDependencyError", "SettingsError",
        "StalledCollectiveError", "TrackerError", "UnsupportedError",
    ), "accel_state.errors"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
