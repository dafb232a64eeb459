"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_state.versions import compare_versions, is_torch_version

__all__ = ["compare_versions", "is_torch_version"]

_EXPORTS = {
    **dict.fromkeys(("compare_versions", "is_torch_version"), "accel_state.versions"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
