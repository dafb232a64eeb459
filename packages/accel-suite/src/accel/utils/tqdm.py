"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from accel_state._lazy import Table, attach

if TYPE_CHECKING:
    from accel_state.progress import tqdm

__all__ = ["tqdm"]

_EXPORTS = {
    **dict.fromkeys(("tqdm",), "accel_state.progress"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)

class _CallableModule(Table):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.tqdm(*arguments, **options)


# Importing this module binds it in its package, where the name is that of a function.
sys.modules[__name__].__class__ = _CallableModule
