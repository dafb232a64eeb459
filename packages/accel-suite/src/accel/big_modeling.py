"""Models larger than memory.

Written by tools/gen_exports.py from api.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_bigmodel.empty import init_empty_weights, init_on_device

__all__ = ["init_empty_weights", "init_on_device"]

_EXPORTS = {
    **dict.fromkeys(("init_empty_weights", "init_on_device"), "accel_bigmodel.empty"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
