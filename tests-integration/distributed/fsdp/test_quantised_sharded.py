"""Adapters of a quantised Llama, whose frozen weights FSDP2 shards, train as in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_train import Accelerator
from harness import cases, distributed
from harness.small_llama import make_llama

bnb = pytest.importorskip("bitsandbytes")

ROWS = torch.randint(0, 17, (4, 12), generator=torch.Generator().manual_seed(1))
KINDS = {
    "uint8": {"quant_storage": torch.uint8},
    "bf16": {"quant_storage": torch.bfloat16},
    "float32": {"quant_storage": torch.float32},
    "double": {"quant_storage": torch.uint8, "compress_statistics": True},
    "8 bit": None,
}


class Adapted(nn.Module):
    """A frozen quantised layer, and a trained product of two small ones beside it."""

    def __init__(self, layer, kind):
        super().__init__()
        sizes = layer.in_features, layer.out_features
        if kind is None:
            self.base = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        else:
            options = {"compress_statistics": False, "quant_type": "nf4"} | kind
            self.base = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.float32, **options)
        self.base.load_state_dict(layer.state_dict())
        self.down, self.up = nn.Linear(sizes[0], 4, bias=False), nn.Linear(4, sizes[1], bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def make_model(kind, seed=0):
    model = make_llama(hidden_size=64, intermediate_size=96).requires_grad_(requires_grad=False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in [*part.named_children()]:
                if isinstance(module, nn.Linear):
                    setattr(part, name, Adapted(module, KINDS[kind]))
    if seed:
        for name, parameter in model.named_parameters():
            # The text that has the mean of double-quantised scales has another length for other weights.
            if ".down." in name or (".base." in name and kind != "double"):
                nn.init.normal_(parameter, std=0.02 * seed)
    return model.to("cpu")  # bitsandbytes quantises when it moves a model


def prepare(kind, *, seed=0, precision="no", **plugin):
    AcceleratorState._reset_state(reset_partial_state=True)
    options = {"auto_wrap_policy": "transformer_based_wrap"} | plugin
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision=precision)
    model = make_model(kind, seed)
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def bytes_of(tensor):
    """A tensor's bytes: packed values seen as floating-point numbers may be NaN."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def loss_of(model, rows):
    return model(input_ids=rows, labels=rows).loss


def train(accelerator, model, optimizer, steps):
    rank, size = accelerator.process_index, accelerator.num_processes
    for _ in range(steps):
        accelerator.backward(loss_of(model, ROWS.chunk(size)[rank]))
        optimizer.step()
        optimizer.zero_grad()


def train_alone(model, optimizer, steps):
    for _ in range(steps):
        (sum(loss_of(model, rows) for rows in ROWS.chunk(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", cases(KINDS, always={"uint8", "bf16", "8 bit"}))
@distributed(world_size=2)
def test_the_forward_is_bit_equal_and_ten_steps_are_those_of_one_process(kind):
    alone = make_model(kind)
    for module in alone.modules():  # else some CPUs repack its weights, of multiples of a block, in bfloat16
        module.support_avx512bf16_for_cpu = False
    expected = optimizer_of(alone)
    accelerator, model, optimizer = prepare(kind)
    for mode in (True, False):
        model.train(mode)
        alone.train(mode)
        with torch.no_grad():
            assert torch.equal(model(ROWS).logits, alone(ROWS).logits)
    model.train()
    alone.train()
    train(accelerator, model, optimizer, 10)
    train_alone(alone, expected, 10)
    trained = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        state = alone.state_dict()
        assert trained.keys() == state.keys()
        for name, value in state.items():
            if ".up." in name or ".down." in name:
                torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-5)
            else:
                assert torch.equal(*map(bytes_of, (trained[name], value))), name


@pytest.mark.parametrize("kind", cases(KINDS, always={"uint8", "bf16", "8 bit"}))
@distributed(world_size=2)
def test_each_rank_holds_half_of_the_packed_values(kind):
    whole = sum(p.nbytes for n, p in make_model(kind).named_parameters() if "base" in n)
    _, model, _ = prepare(kind)
    own = [p for n, p in model.named_parameters() if "base" in n]
    assert all(isinstance(parameter, DTensor) for parameter in own)
    assert sum(parameter.to_local().nbytes for parameter in own) == whole // 2
    loss_of(model, ROWS).backward()  # and keeps no gathered ones after a step
    states = [m.base.state.CB for m in model.modules() if isinstance(m, Adapted) and kind == "8 bit"]
    assert all(state.untyped_storage().size() == 0 for state in states)


@pytest.mark.parametrize("kind", cases(KINDS, always={"uint8", "bf16", "8 bit"}))
@distributed(world_size=2)
def test_a_run_resumes_and_its_adapters_are_merged_as_in_one_process(kind, tmp_path):
    accelerator, model, optimizer = prepare(kind)
    train(accelerator, model, optimizer, 2)
    accelerator.save_state(tmp_path / "state")
    train(accelerator, model, optimizer, 2)
    expected = accelerator.get_state_dict(model)
    accelerator, model, optimizer = prepare(kind, seed=1)  # other weights and scales
    accelerator.load_state(tmp_path / "state")
    train(accelerator, model, optimizer, 2)
    resumed, logits = accelerator.get_state_dict(model), model(ROWS).logits
    if accelerator.is_main_process:
        assert resumed.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(*map(bytes_of, (resumed[name], value))), name
        merged = merge(resumed, kind)
        torch.testing.assert_close(merged(ROWS).logits, logits, rtol=1e-3, atol=1e-4)


def merge(state, kind):
    """Return a Llama without adapters, from the state dict of one with them and with quantised weights."""
    model = make_llama(hidden_size=64, intermediate_size=96)
    dense = {name: value for name, value in state.items() if ".base." not in name}
    for name in [name.removesuffix("base.weight") for name in state if name.endswith("base.weight")]:
        where = f"{name}base.weight"
        if kind == "8 bit":
            weight = state[where].float() * state[f"{name}base.SCB"].unsqueeze(1) / 127
        else:
            parts = {
                key.removeprefix(f"{where}."): state[key] for key in state if key.startswith(f"{where}.")
            }
            scales = bnb.functional.QuantState.from_dict(parts, device=torch.device("cpu"))
            weight = bnb.functional.dequantize_4bit(state[where], scales)
        product = dense.pop(f"{name}up.weight") @ dense.pop(f"{name}down.weight")
        dense[f"{name}weight"] = weight + product
    model.load_state_dict(dense)
    return model


@distributed(world_size=2)
def test_what_cannot_be_sharded_is_refused_by_name():
    with pytest.raises(SettingsError, match=r"q_proj.base.weight'.*stores .*float32.*cast .*bfloat16"):
        prepare("float32", precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    dense = bnb.nn.Linear8bitLt(64, 64)  # quantises what it trains at each forward pass
    with pytest.raises(SettingsError, match=r"'weight' \(Int8Params of bitsandbytes\) is trained"):
        accelerator.prepare(dense)
    unquantised = bnb.nn.Linear4bit(64, 64)
    with pytest.raises(SettingsError, match=r"'weight' \(Params4bit of bitsandbytes\) is not quantised yet"):
        accelerator.prepare(unquantised)


@distributed(world_size=2)
def test_packed_values_are_not_cast_by_mixed_precision():
    alone = make_model("bf16")
    accelerator, model, optimizer = prepare("bf16", precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(ROWS).logits
    torch.testing.assert_close(model(ROWS).logits.float(), expected.float(), rtol=0, atol=0.01)
    train(accelerator, model, optimizer, 1)
    trained = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        for name, value in alone.state_dict().items():
            if ".base." in name:
                assert torch.equal(*map(bytes_of, (trained[name], value)))
