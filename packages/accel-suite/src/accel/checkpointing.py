"""What a saved state consists of.

Written by tools/gen_exports.py from api.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.weights.names import MODEL_NAME, SAFE_MODEL_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

__all__ = ["MODEL_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_NAME", "WEIGHTS_NAME"]

_EXPORTS = {
    **dict.fromkeys((
        "MODEL_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_NAME", "WEIGHTS_NAME",
    ), "accel_ops.weights.names"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
