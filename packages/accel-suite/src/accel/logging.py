"""Loggers that speak once per run rather than once per process.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.logging import MultiProcessAdapter, get_logger

__all__ = ["MultiProcessAdapter", "get_logger"]

_EXPORTS = {
    **dict.fromkeys(("MultiProcessAdapter", "get_logger"), "accel_state.logging"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
