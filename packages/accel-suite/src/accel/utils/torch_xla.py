"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_cli.install_xla import install_xla

__all__ = ["install_xla"]

_EXPORTS = {
    **dict.fromkeys(("install_xla",), "accel_cli.install_xla"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
