"""The sizes of the axes of a device mesh.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.parallelism.config import ParallelismConfig

__all__ = ["ParallelismConfig"]

_EXPORTS = {
    **dict.fromkeys(("ParallelismConfig",), "accel_plugins.parallelism.config"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
