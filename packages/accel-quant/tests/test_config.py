"""The settings of quantisation, which need no library."""

from __future__ import annotations

import pytest
import torch

from accel_quant import BnbQuantizationConfig
from accel_state.errors import SettingsError
from accel_state.labels import CustomDtype


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither of load_in_8bit and load_in_4bit"),
        ({"load_in_8bit": True, "load_in_4bit": True}, "both of"),
        ({"load_in_8bit": 1}, "load_in_8bit is 1: it must be True or False"),
        ({"load_in_8bit": True, "llm_int8_threshold": "six"}, "'six': it must be a number"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "np4"}, "'np4': it must be 'fp4' or 'nf4'"),
        ({"load_in_4bit": True, "bnb_4bit_use_double_quant": "yes"}, "'yes': it must be True or False"),
        ({"load_in_4bit": True, "bnb_4bit_compute_dtype": "fp8"}, "bnb_4bit_compute_dtype is 'fp8'"),
        ({"load_in_4bit": True, "torch_dtype": torch.int8}, "torch_dtype is torch.int8"),
        ({"load_in_4bit": True, "skip_modules": "head"}, "skip_modules is 'head': it must be a list"),
        ({"load_in_4bit": True, "keep_in_fp32_modules": [1]}, "keep_in_fp32_modules"),
    ],
)
def test_a_field_that_cannot_be_is_named(fields, message):
    with pytest.raises(SettingsError, match=message):
        BnbQuantizationConfig(**fields)


def test_texts_become_types():
    config = BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_compute_dtype="bf16", torch_dtype="fp32")
    assert (config.bnb_4bit_compute_dtype, config.torch_dtype) == (torch.bfloat16, torch.float32)
    assert config.target_dtype is CustomDtype.INT4
    assert BnbQuantizationConfig(load_in_8bit=True).target_dtype is torch.int8
