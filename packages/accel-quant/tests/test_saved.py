"""Saved quantised weights that are damaged end in a sentence, before a kernel reads them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights
from accel_ops.weights.write import save_state_dict
from accel_quant import BnbQuantizationConfig, load_and_quantize_model
from accel_state.errors import CheckpointError

pytest.importorskip("bitsandbytes")

NAME = "0.weight"
STATE = "0.weight.quant_state.bitsandbytes__nf4"
FOUR = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
EIGHT = {"load_in_8bit": True}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 96), nn.Linear(96, 8)).eval()


def quantised(settings, *where):
    config = BnbQuantizationConfig(**settings, torch_dtype=torch.float32, skip_modules=["1"])
    if not where:
        return load_and_quantize_model(net(), config, device_map={"": "cpu"})
    with init_empty_weights():
        skeleton = net()
    return load_and_quantize_model(skeleton, config, *where, device_map={"": "cpu"})


def saved(settings):
    return {name: tensor.contiguous() for name, tensor in quantised(settings).state_dict().items()}


def packed(state):
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def with_fields(**changed):
    """Change the fields of the state that is JSON; None removes one."""

    def change(tensors):
        state = json.loads(bytes(tensors[STATE].tolist())) | changed
        tensors[STATE] = packed({name: value for name, value in state.items() if value is not None})

    return change


def with_tensor(name, make):
    """Replace a tensor by what is made of it; None removes it."""

    def change(tensors):
        made = make(tensors.pop(name))
        if made is not None:
            tensors[name] = made

    return change


DAMAGE = {
    "a larger shape": with_fields(shape=[1 << 20, 128]),
    "a shape of other numbers": with_fields(shape=[96.0, 128.0]),
    "no shape": with_fields(shape=None),
    "a shape that is no list": with_fields(shape="96"),
    "blocks of 1": with_fields(blocksize=1),
    "blocks of 0": with_fields(blocksize=0),
    "blocks of -64": with_fields(blocksize=-64),
    "smaller blocks": with_fields(blocksize=32),
    "blocks that are a list": with_fields(blocksize=[64]),
    "smaller nested blocks": with_fields(nested_blocksize=32),
    "a type of torch that is none": with_fields(dtype="nn"),
    "a nested type that is none": with_fields(nested_dtype="load"),
    "a huge offset": with_fields(nested_offset=10**400),
    "a field too many": with_fields(more=1),
    "a field with a long name": with_fields(**{"x" * 3000: 1}),
    "deep JSON": with_tensor(STATE, lambda _: torch.full((4000,), ord("["), dtype=torch.uint8)),
    "much JSON": with_tensor(STATE, lambda _: torch.full((1 << 20,), ord("["), dtype=torch.uint8)),
    "JSON that is a list": with_tensor(STATE, lambda _: packed([1])),
    "no JSON": with_tensor(STATE, lambda old: old.fill_(255)),
    "a state of numbers": with_tensor(STATE, lambda old: old.float()),
    "no state": with_tensor(STATE, lambda _: None),
    "a packed weight that is short": with_tensor(NAME, lambda old: old[:-1].clone()),
    "a packed weight of another type": with_tensor(NAME, lambda old: old.view(torch.int8)),
    "scales that are short": with_tensor(f"{NAME}.absmax", lambda old: old[:-1].clone()),
    "scales of another type": with_tensor(f"{NAME}.absmax", lambda old: old.float()),
    "no scales": with_tensor(f"{NAME}.absmax", lambda _: None),
    "nested scales that are short": with_tensor(f"{NAME}.nested_absmax", lambda old: old[:0].clone()),
    "no nested scales": with_tensor(f"{NAME}.nested_absmax", lambda _: None),
    "a code that is short": with_tensor(f"{NAME}.quant_map", lambda old: old[:-1].clone()),
    "a nested code that is short": with_tensor(f"{NAME}.nested_quant_map", lambda old: old[:-1].clone()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_4_bit_weight_is_refused_with_the_file_and_its_name(damage, tmp_path):
    tensors, file = saved(FOUR), tmp_path / "model.safetensors"
    save_file(tensors, file)
    quantised(FOUR, file)
    DAMAGE[damage](tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError) as raised:
        quantised(FOUR, file)
    text = str(raised.value)
    assert str(file) in text
    assert NAME in text
    assert len(text) < 600
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "make"),
    {
        "short scales": ("0.SCB", lambda old: old[:-1].clone()),
        "scales of integers": ("0.SCB", lambda old: old.to(torch.int32)),
        "numbers of another type": (NAME, lambda old: old.view(torch.uint8)),
        "another shape": (NAME, lambda old: old.view(128, 96)),
        "fewer numbers": (NAME, lambda old: old[:-1].clone()),
    }.values(),
)
def test_a_damaged_8_bit_weight_is_refused_with_the_file_and_its_name(name, make, tmp_path):
    tensors, file = saved(EIGHT), tmp_path / "model.safetensors"
    with_tensor(name, make)(tensors)
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*'0\.weight'"):
        quantised(EIGHT, file)


def test_a_weight_saved_with_4_bits_is_not_one_of_8_bits(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(saved(FOUR), file)
    with pytest.raises(CheckpointError, match=r"'0\.weight' has no 'SCB'"):
        quantised(EIGHT, file)


def test_a_float_weight_of_another_shape_is_refused(tmp_path):
    save_state_dict({**net().state_dict(), NAME: torch.ones(96, 64)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"'0\.weight' has the shape \[96, 64\]"):
        quantised(FOUR, tmp_path)


def test_views_in_a_bin_file_are_not_read_by_address(tmp_path):
    """A tensor that is one number many times has no memory behind it."""
    tensors = saved(FOUR)
    expanded = tensors[f"{NAME}.absmax"][:1].expand(tensors[f"{NAME}.absmax"].numel())
    torch.save({**tensors, f"{NAME}.absmax": expanded}, tmp_path / "pytorch_model.bin")
    scales = quantised(FOUR, tmp_path)[0].weight.quant_state.absmax
    assert scales.is_contiguous()
    assert torch.equal(scales, expanded)


def test_a_damaged_state_dict_changes_no_layer():
    model = quantised(FOUR)
    tensors = saved(FOUR)
    DAMAGE["scales that are short"](tensors)
    before = saved(FOUR)
    with pytest.raises(CheckpointError, match=r"state dict's quantised weight '0\.weight'"):
        model.load_state_dict(tensors)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
