"""Names under the path by which users of Accelerate import them.

Written by tools/gen_exports.py from api.toml and aliases.toml; change it there.
"""

# fmt: off
from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_quant.bnb.convert import has_4bit_bnb_layers
    from accel_quant.bnb.load import load_and_quantize_model

__all__ = ["has_4bit_bnb_layers", "load_and_quantize_model"]

_EXPORTS = {
    **dict.fromkeys(("has_4bit_bnb_layers",), "accel_quant.bnb.convert"),
    **dict.fromkeys(("load_and_quantize_model",), "accel_quant.bnb.load"),
}
__getattr__, __dir__ = attach(__name__, _EXPORTS)
