"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.fp8.te import (
        apply_fp8_autowrap, contextual_fp8_autocast, convert_model, has_transformer_engine_layers,
    )

__all__ = [
    "apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers",
]

_EXPORTS = {
    **dict.fromkeys((
        "apply_fp8_autowrap", "contextual_fp8_autocast", "convert_model", "has_transformer_engine_layers",
    ), "accel_plugins.fp8.te"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
