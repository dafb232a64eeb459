"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.batch_size import find_executable_batch_size, should_reduce_batch_size
    from accel_state.memory import clear_device_cache, release_memory

__all__ = ["clear_device_cache", "find_executable_batch_size", "release_memory", "should_reduce_batch_size"]

_EXPORTS = {
    **dict.fromkeys(("find_executable_batch_size", "should_reduce_batch_size"), "accel_state.batch_size"),
    **dict.fromkeys(("clear_device_cache", "release_memory"), "accel_state.memory"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
