"""Sharded models and their checkpoints.

Written by tools/gen_exports.py from api.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.weights.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
    from accel_train.checkpoint.layout import OPTIMIZER_NAME

__all__ = ["OPTIMIZER_NAME", "SAFE_WEIGHTS_NAME", "WEIGHTS_NAME"]

_EXPORTS = {
    **dict.fromkeys(("SAFE_WEIGHTS_NAME", "WEIGHTS_NAME"), "accel_ops.weights.names"),
    **dict.fromkeys(("OPTIMIZER_NAME",), "accel_train.checkpoint.layout"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
