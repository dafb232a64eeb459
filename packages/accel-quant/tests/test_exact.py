"""4-bit layers, in the form that bitsandbytes gives them on a processor with AVX512-BF16 too."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from accel_bigmodel import cpu_offload, init_empty_weights
from accel_ops.weights.write import save_state_dict
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

bnb = pytest.importorskip("bitsandbytes")

CPU = {"": "cpu"}  # also where there is an accelerator: no other processor packs
KINDS = {
    "nf4": {"bnb_4bit_quant_type": "nf4"},
    "fp4": {"bnb_4bit_quant_type": "fp4"},
    "double": {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


@pytest.fixture(autouse=True)
def _packing_processor(monkeypatch):
    """Pack layers on every processor. (Without the kernel for them, outputs have no meaning.)"""
    if not hasattr(bnb.nn.modules, "has_avx512bf16"):
        pytest.skip("this bitsandbytes never packs")
    monkeypatch.setattr(bnb.nn.modules, "has_avx512bf16", lambda: True)


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(5, 128)


def float_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 128), nn.Linear(128, 8)).eval()


def settings(kind):
    return BnbQuantizationConfig(
        load_in_4bit=True, torch_dtype="fp32", bnb_4bit_compute_dtype="fp32", **KINDS[kind]
    )


def quantised(kind="nf4", *where, **how):
    return load_and_quantize_model(float_net(), settings(kind), *where, **{"device_map": CPU, **how})


def run(model, x):
    with torch.no_grad():
        return model(x)


def is_packed(model):
    return [
        getattr(layer.weight.quant_state, "packing_format_for_cpu", False)
        for layer in model
        if isinstance(layer, bnb.nn.Linear4bit)
    ]


def copied(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor, right[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_does_not_depend_on_whether_the_model_has_run(kind, x):
    model = quantised(kind)
    before = copied(model.state_dict())
    first = run(model, x)
    assert is_packed(model) == [True, True]
    after = model.state_dict()
    assert_same(after, before)
    assert torch.equal(run(model, x), first)
    assert_same(after, before)  # nothing of it belongs to the layer that was packed again
    assert_same(model.state_dict(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_has_run_is_saved_and_loaded_exactly(kind, x, tmp_path):
    model = quantised(kind)
    output = run(model, x)
    save_state_dict(model.state_dict(), tmp_path)
    with init_empty_weights():
        again = float_net()
    again = load_and_quantize_model(again, settings(kind), tmp_path, device_map=CPU)
    assert torch.equal(run(again, x), output)
    assert_same(again.state_dict(), model.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_is_loaded_into_a_model_that_has_run(kind, x):
    model = quantised(kind)
    wanted = copied(model.state_dict())
    output = run(model, x)
    torch.manual_seed(2)
    other = load_and_quantize_model(
        nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 128), nn.Linear(128, 8)).eval(),
        settings(kind),
        device_map=CPU,
    )
    assert not torch.equal(run(other, x), output)
    other.load_state_dict(wanted)
    assert_same(other.state_dict(), wanted)
    assert torch.equal(run(other, x), output)


def test_a_copy_of_a_model_that_has_run_is_exact_too(x):
    model = quantised("double")
    before = copied(model.state_dict())
    output = run(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_same(other.state_dict(), before)
        assert torch.equal(run(other, x), output)
    assert_same(model.state_dict(), before)


def test_a_gradient_flows_after_a_run_without_one(x):
    model = quantised()
    run(model, x)
    x.requires_grad_()
    model(x).sum().backward()
    dense = float_net()
    for mine, layer in zip(dense, model, strict=True):
        if isinstance(layer, bnb.nn.Linear4bit):
            assert layer.weight.quant_state.dtype == torch.float32
            value = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            mine.weight.data = value
    again = x.detach().clone().requires_grad_()
    dense(again).sum().backward()
    assert torch.allclose(x.grad, again.grad, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 100), (96, 64), (100, 64), (32, 32), (64, 33)])
def test_a_shape_that_cannot_be_packed_runs(inputs, outputs):
    float_model = nn.Sequential(nn.Linear(inputs, outputs), nn.Linear(outputs, 8)).eval()
    model = load_and_quantize_model(copy.deepcopy(float_model), settings("nf4"), device_map=CPU)
    x = torch.randn(5, inputs)
    wanted = float_model(x).detach()
    assert 0 < (run(model, x) - wanted).norm() / wanted.norm() < 0.2


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_layers_run_again_and_again(kind, x, tmp_path):
    wanted = quantised(kind)(x.requires_grad_()).detach()  # with gradients, so never packed
    x.requires_grad_(False)
    model = quantised(kind, device_map={"": "disk"}, offload_folder=tmp_path)
    moved = quantised(kind)
    run(moved, x)
    cpu_offload(moved, execution_device="cpu")
    for _ in range(3):
        assert torch.allclose(run(model, x), wanted, atol=1e-5)
        assert torch.allclose(run(moved, x), wanted, atol=1e-5)
