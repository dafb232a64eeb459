"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.config.basic import write_basic_config

__all__ = ["write_basic_config"]

_EXPORTS = {
    **dict.fromkeys(("write_basic_config",), "accel_cli.config.basic"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
