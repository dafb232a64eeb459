"""Training in which processes agree only now and then.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_train.local_sgd import LocalSGD

__all__ = ["LocalSGD"]

_EXPORTS = {
    **dict.fromkeys(("LocalSGD",), "accel_train.local_sgd"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
