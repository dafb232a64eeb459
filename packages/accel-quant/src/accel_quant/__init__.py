"""Models with 8-bit and 4-bit weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_state._lazy import attach

if TYPE_CHECKING:
    from accel_quant.bnb.config import BnbQuantizationConfig as BnbQuantizationConfig
    from accel_quant.bnb.convert import has_4bit_bnb_layers as has_4bit_bnb_layers
    from accel_quant.bnb.load import load_and_quantize_model as load_and_quantize_model

__all__ = ["BnbQuantizationConfig", "has_4bit_bnb_layers", "load_and_quantize_model"]

__getattr__, __dir__ = attach(
    __name__,
    {
        "BnbQuantizationConfig": "accel_quant.bnb.config",
        "has_4bit_bnb_layers": "accel_quant.bnb.convert",
        "load_and_quantize_model": "accel_quant.bnb.load",
    },
)
