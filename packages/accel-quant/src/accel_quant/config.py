"""The options of bitsandbytes: `BnbQuantizationConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from accel_state.errors import SettingsError
from accel_state.labels import CustomDtype

_COMPUTE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_QUANT_TYPES = ("fp4", "nf4")


@dataclass
class BnbQuantizationConfig:
    """The options with which bitsandbytes quantises a model.

    Args:
        load_in_8bit: Linear weights become 8-bit integers with a scale per row.
        llm_int8_threshold: Inputs above this are computed in 16 bits (8-bit only); 0 disables this.
        load_in_4bit: Linear weights become 4-bit numbers with a scale per block of 64.
        bnb_4bit_quant_type: `"fp4"` or `"nf4"`, the latter for normally distributed weights.
        bnb_4bit_use_double_quant: Quantise the scales too.
        bnb_4bit_compute_dtype: The dtype of 4-bit arithmetic: `"fp32"`, `"fp16"`, `"bf16"` or a torch dtype.
        torch_dtype: The dtype of tensors that are not quantised, `torch.float16` by default.
        skip_modules: Modules that are not quantised; by default the output head and tied modules.
        keep_in_fp32_modules: Modules that are not quantised and stay in float32.

    Attributes:
        target_dtype: The dtype of quantised weights, for size estimates.

    Raises:
        SettingsError: A field has an invalid value, or not exactly one of 8 bits and 4 bits is selected.

    Example:
        >>> BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4").torch_dtype
        torch.float16
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: torch.dtype | str | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None
    target_dtype: torch.dtype | CustomDtype = field(init=False)

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):
                raise SettingsError(f"{name} is {getattr(self, name)!r}: it must be True or False")
        if self.load_in_8bit == self.load_in_4bit:
            both = "both" if self.load_in_8bit else "neither"
            raise SettingsError(f"{both} of load_in_8bit and load_in_4bit are set: choose one")
        if not isinstance(self.llm_int8_threshold, (int, float)) or isinstance(self.llm_int8_threshold, bool):
            raise SettingsError(f"llm_int8_threshold is {self.llm_int8_threshold!r}: it must be a number")
        if self.bnb_4bit_quant_type not in _QUANT_TYPES:
            raise SettingsError(
                f"bnb_4bit_quant_type is {self.bnb_4bit_quant_type!r}: it must be 'fp4' or 'nf4'"
            )
        self.bnb_4bit_compute_dtype = _dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        dtype = torch.float16 if self.torch_dtype is None else self.torch_dtype
        self.torch_dtype = _dtype("torch_dtype", dtype)
        for name in ("skip_modules", "keep_in_fp32_modules"):
            _check_names(name, getattr(self, name))
        self.target_dtype = torch.int8 if self.load_in_8bit else CustomDtype.INT4


def _dtype(name: str, value: str | torch.dtype) -> torch.dtype:
    dtype = value if isinstance(value, torch.dtype) else _COMPUTE.get(str(value))
    if dtype is None or not dtype.is_floating_point:
        raise SettingsError(
            f"{name} is {value!r}: it must be 'fp32', 'fp16', 'bf16' or a floating torch dtype"
        )
    return dtype


def _check_names(field_name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise SettingsError(f"{field_name} is {value!r}: it must be a list of module names")
