"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.weights.names import (
        MODEL_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_PATTERN_NAME,
        WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_PATTERN_NAME,
    )
    from accel_train.accelerator import Accelerator
    from accel_train.checkpoint.layout import SCALER_NAME
    from accel_train.profiling import PROFILE_PATTERN_NAME

__all__ = [
    "Accelerator", "MODEL_NAME", "PROFILE_PATTERN_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME",
    "SAFE_WEIGHTS_PATTERN_NAME", "SCALER_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME",
]

_EXPORTS = {
    **dict.fromkeys((
        "MODEL_NAME", "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME",
        "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME", "WEIGHTS_PATTERN_NAME",
    ), "accel_ops.weights.names"),
    **dict.fromkeys(("Accelerator",), "accel_train.accelerator"),
    **dict.fromkeys(("SCALER_NAME",), "accel_train.checkpoint.layout"),
    **dict.fromkeys(("PROFILE_PATTERN_NAME",), "accel_train.profiling"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
