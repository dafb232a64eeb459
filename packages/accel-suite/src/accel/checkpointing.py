"""What a saved state consists of.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_ops.weights.names import MODEL_NAME, SAFE_MODEL_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME
    from accel_train.checkpoint.layout import (
        OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, SCALER_NAME, SCHEDULER_NAME,
    )
    from accel_train.checkpoint.objects import (
        load_accelerator_state, load_custom_state, save_accelerator_state, save_custom_state,
    )

__all__ = [
    "MODEL_NAME", "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_NAME",
    "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME", "WEIGHTS_NAME", "load_accelerator_state",
    "load_custom_state", "save_accelerator_state", "save_custom_state",
]

_EXPORTS = {
    **dict.fromkeys((
        "MODEL_NAME", "SAFE_MODEL_NAME", "SAFE_WEIGHTS_NAME", "WEIGHTS_NAME",
    ), "accel_ops.weights.names"),
    **dict.fromkeys((
        "OPTIMIZER_NAME", "RNG_STATE_NAME", "SAMPLER_NAME", "SCALER_NAME", "SCHEDULER_NAME",
    ), "accel_train.checkpoint.layout"),
    **dict.fromkeys((
        "load_accelerator_state", "load_custom_state", "save_accelerator_state", "save_custom_state",
    ), "accel_train.checkpoint.objects"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
