"""Quantised models: the settings, the maps, the files, and the numbers beside the float model."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from accel_bigmodel import dispatch_model, init_empty_weights
from accel_ops.weights.write import save_state_dict
from accel_quant import BnbQuantizationConfig, has_4bit_bnb_layers, load_and_quantize_model
from accel_quant.layers import (
    Quantizer,
    default_skipped,
    is_listed,
)
from accel_state.errors import CheckpointError, MissingDependencyError, SettingsError

bnb = pytest.importorskip("bitsandbytes")

KINDS = {
    "8 bit": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4, double": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
    },
}  # fmt: skip
BOUND = {"8 bit": 0.02, "nf4": 0.2, "fp4": 0.3, "nf4, double": 0.2}


GPU = pytest.param("accelerator", marks=pytest.mark.gpu)


def load(model, config, *where, **options):
    """Load on the CPU, also where there is an accelerator, unless a map says otherwise."""
    return load_and_quantize_model(model, config, *where, **{"device_map": {"": "cpu"}, **options})


def settings(kind, **more):
    return BnbQuantizationConfig(
        **KINDS[kind], torch_dtype=torch.float32, bnb_4bit_compute_dtype="fp32", **more
    )


class Net(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.GELU()) for _ in range(3)]
        )
        self.head = nn.Linear(width, 20, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def tokens():
    return torch.arange(12).reshape(2, 6)


def skeleton():
    with init_empty_weights():
        return Net().eval()


def error(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_loaded_model_is_quantised(net, tokens, kind, device):
    wanted = net(tokens)
    where = {"": "cpu"} if device == "cpu" else None
    model = load(copy.deepcopy(net), settings(kind), device_map=where)
    here = model.embed.weight.device
    assert (here.type == "cpu") == (device == "cpu")
    wanted_class = bnb.nn.Linear8bitLt if kind == "8 bit" else bnb.nn.Linear4bit
    assert all(type(layer[0]) is wanted_class for layer in model.layers)
    assert type(model.head) is nn.Linear  # the output head
    assert model.layers[0][0].weight.dtype == (torch.int8 if kind == "8 bit" else torch.uint8)
    assert 0 < error(model(tokens.to(here)).cpu(), wanted) < BOUND[kind]
    assert has_4bit_bnb_layers(model) == (kind != "8 bit")
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cpu", "half", "disk"])
def test_a_meta_model_is_filled_under_every_map(net, tokens, tmp_path, kind, place):
    save_state_dict(net.state_dict(), tmp_path / "ck", max_shard_size="100KB")
    plan = {
        "cpu": {"": "cpu"},
        "half": {"embed": "cpu", "layers.0": "cpu", "layers.1": "disk", "layers.2": "disk", "head": "cpu"},
        "disk": {"": "disk"},
    }[place]
    reference = load(copy.deepcopy(net), settings(kind))(tokens)
    model = load(
        skeleton(), settings(kind), tmp_path / "ck", device_map=plan, offload_folder=tmp_path / "off"
    )
    for _ in range(3):
        assert torch.allclose(model(tokens), reference, atol=1e-5)
    if place == "disk":
        assert all(parameter.is_meta for parameter in model.parameters())
        state = getattr(model.layers[0][0], "state", None)
        assert state is None or state.CB is None  # nothing stays in memory between forwards


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_quantised_model_is_saved_and_loaded_as_it_is(net, tokens, tmp_path, kind, device):
    where = {"": "cpu"} if device == "cpu" else None
    model = load(net, settings(kind), device_map=where)
    tokens = tokens.to(model.embed.weight.device)
    wanted = model(tokens)
    save_state_dict(model.state_dict(), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved["layers.0.0.weight"].dtype in (torch.int8, torch.uint8)
    again = load(skeleton(), settings(kind), tmp_path, device_map=where)
    assert torch.equal(again(tokens), wanted)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_used", [False, True])
def test_scales_of_offloaded_weights_are_in_the_state_dict(net, tokens, tmp_path, kind, is_used):
    resident = load(copy.deepcopy(net), settings(kind))
    plan = {"embed": "cpu", "layers.0": "disk", "layers.1": "cpu", "layers.2": "disk", "head": "cpu"}
    model = load(net, settings(kind), device_map=plan, offload_folder=tmp_path)
    if is_used:
        model(tokens)
    found, expected = model.state_dict(), resident.state_dict()
    assert found.keys() == expected.keys()
    assert found["layers.0.0.weight"].is_meta
    for name, tensor in found.items():
        assert tensor.is_meta or torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["cpu", "half", "disk"])
def test_a_model_that_has_run_is_dispatched(net, tokens, tmp_path, kind, place):
    model = load(net, settings(kind))
    wanted = model(tokens)
    plan = {
        "cpu": {"": "cpu"},
        "half": {"embed": "cpu", "layers.0": "cpu", "layers.1": "disk", "layers.2": "cpu", "head": "disk"},
        "disk": {"": "disk"},
    }[place]
    dispatch_model(model, plan, offload_dir=tmp_path, force_hooks=True)
    for _ in range(2):
        assert torch.allclose(model(tokens), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "nf4, double"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_give_what_the_library_gives_at_once(kind, dtype):
    weight = torch.randn(1030, 1024).to(dtype)  # a piece and a bit
    config = settings(kind)
    layer = bnb.nn.Linear4bit(1024, 1030, bias=False)
    mine = Quantizer(config=config, bnb=bnb).quantize(weight, torch.device("cpu"), layer)
    whole = bnb.nn.Params4bit(
        weight.clone(),
        requires_grad=False,
        compress_statistics=config.bnb_4bit_use_double_quant,
        quant_type=config.bnb_4bit_quant_type,
    ).to("cpu")
    assert torch.equal(mine.data, whole.data)
    left, right = mine.quant_state.as_dict(packed=True), whole.quant_state.as_dict(packed=True)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_those_of_the_library(dtype):
    weight = torch.randn(48, 32).to(dtype)
    made = Quantizer(config=settings("8 bit"), bnb=bnb).quantize(weight, torch.device("cpu"), nn.Module())
    whole = bnb.nn.Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False).to("cpu")
    assert made.dtype == torch.int8
    for found, expected in ((made.data, whole.data), (made.CB, whole.CB), (made.SCB, whole.SCB)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_on_a_gpu_is_quantised_at_once(tokens, kind):
    torch.manual_seed(0)
    model = Net(1024).cuda().half().eval()
    before = torch.cuda.memory_allocated()
    model = load(model, settings(kind), device_map=None)
    assert torch.cuda.memory_allocated() < 0.65 * before
    weight = model.layers[0][0].weight
    assert weight.dtype == (torch.int8 if kind == "8 bit" else torch.uint8)
    assert kind != "8 bit" or "layers.0.0.SCB" in model.state_dict()
    assert model(tokens.cuda()).isfinite().all()


def test_modules_are_skipped_or_kept_in_float32(net):
    config = BnbQuantizationConfig(
        load_in_8bit=True, skip_modules=["layers.1"], keep_in_fp32_modules=["layers.2"], torch_dtype="bf16"
    )
    model = load(net, config)
    assert type(model.layers[0][0]) is bnb.nn.Linear8bitLt
    assert type(model.layers[1][0]) is nn.Linear
    assert model.layers[1][0].weight.dtype == torch.bfloat16
    assert model.layers[2][0].weight.dtype == torch.float32
    assert type(model.head) is bnb.nn.Linear8bitLt
    assert model.embed.weight.dtype == torch.bfloat16


def test_what_is_tied_or_last_is_skipped_by_default():
    net = Net()
    assert default_skipped(net) == ["head"]
    net.head.weight = net.embed.weight
    assert default_skipped(net) == ["embed", "head"]
    assert is_listed("a.bc.d", ["bc"])
    assert not is_listed("a.bc.d", ["b"])


def test_ties_survive(net, tokens, tmp_path):
    net.head.weight = net.embed.weight
    wanted = net(tokens)
    save_state_dict(net.state_dict(), tmp_path)
    with init_empty_weights():
        model = Net().eval()
        model.head.weight = model.embed.weight
    model = load(model, settings("8 bit"), tmp_path)
    assert model.head.weight is model.embed.weight
    assert error(model(tokens), wanted) < BOUND["8 bit"]


def test_a_map_counts_quantised_weights_at_their_size(tmp_path):
    wide = Net(512)
    save_state_dict(wide.state_dict(), tmp_path / "ck")
    # In 4 bits the layers have 3 x 131 KB, in float32 3 x 1 MB.
    with init_empty_weights():
        model = Net(512)
    model = load(
        model, settings("nf4"), tmp_path / "ck", device_map="sequential", max_memory={"cpu": "600KB"}
    )
    assert set(model.hf_device_map.values()) == {"cpu"}
    with init_empty_weights():
        model = Net(512)
    with pytest.raises(SettingsError, match=r"to the disk and comes from .*: pass offload_folder"):
        load(model, settings("8 bit"), tmp_path / "ck", device_map="auto", max_memory={"cpu": "600KB"})


def test_what_cannot_work_is_said(net, tmp_path, caplog, monkeypatch):
    with pytest.raises(SettingsError, match="on the meta device: pass weights_location"):
        load(skeleton(), settings("nf4"))
    with pytest.raises(SettingsError, match="device_map is 'somehow'"):
        load(copy.deepcopy(net), settings("nf4"), device_map="somehow")
    with pytest.raises(SettingsError, match="offload_state_dict=True is for a meta model"):
        load(copy.deepcopy(net), settings("nf4"), offload_state_dict=True)
    state = net.state_dict()
    del state["layers.1.0.weight"]
    save_state_dict({**state, "stray": torch.ones(1)}, tmp_path)
    lacks = r"missing from the checkpoint: layers\.1\.0\.weight; unexpected in the checkpoint: stray"
    with pytest.raises(CheckpointError, match=lacks):
        load(skeleton(), settings("nf4"), tmp_path)
    with caplog.at_level(logging.WARNING):
        load(net, settings("nf4", skip_modules=["layers", "head"]))
    assert "No linear layer was quantised" in caplog.text
    monkeypatch.setattr("accel_state.libraries._is_installed", lambda library: False)
    with pytest.raises(MissingDependencyError, match="accel-quant"):
        load(Net(), settings("nf4"))


@pytest.mark.parametrize("kind", ["8 bit", "nf4"])
@pytest.mark.parametrize("source", ["own weights", "pickle", "safetensors"])
def test_a_layer_under_two_names_stays_one_layer(kind, source, tmp_path):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = nn.Linear(64, 64)

        def forward(self, x):
            return self.second(self.first(x))

    model = Twice()
    x = torch.randn(2, 64)
    with torch.no_grad():
        expected = model(x)
    location = None if source == "own weights" else tmp_path
    if location is not None:
        save_state_dict(model.state_dict(), tmp_path, safe_serialization=source == "safetensors")
    quantized = load(model, settings(kind, skip_modules=[]), weights_location=location)
    assert quantized.first is quantized.second
    assert type(quantized.first) in {bnb.nn.Linear8bitLt, bnb.nn.Linear4bit}
    with torch.no_grad():
        assert (quantized(x).float() - expected).norm() < BOUND[kind] * 2 * expected.norm()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_says_that_it_is_quantised_as_peft_and_others_ask(bits) -> None:
    config = BnbQuantizationConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = load(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), config)
    assert (model.is_loaded_in_4bit, model.is_loaded_in_8bit) == (bits == 4, bits == 8)
