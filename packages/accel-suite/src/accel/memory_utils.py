"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.batch_size import find_executable_batch_size

__all__ = ["find_executable_batch_size"]

_EXPORTS = {
    **dict.fromkeys(("find_executable_batch_size",), "accel_state.batch_size"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
