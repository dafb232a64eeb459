"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_plugins.fp8.ao import (
        convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers, torchao_required,
    )

__all__ = [
    "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_ao_layers", "torchao_required",
]

_EXPORTS = {
    **dict.fromkeys((
        "convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "has_ao_layers",
        "torchao_required",
    ), "accel_plugins.fp8.ao"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
