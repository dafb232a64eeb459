"""The scheduler that `prepare` returns.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.scheduler import AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]

_EXPORTS = {
    **dict.fromkeys(("AcceleratedScheduler",), "accel_train.scheduler"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
