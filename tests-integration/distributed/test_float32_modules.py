"""Modules that compute in float32 under FSDP2's mixed precision, as in one process with the same dtypes."""

from __future__ import annotations

import pytest
import torch

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError
from accel_state.libraries import is_torch_version
from accel_train import Accelerator
from harness import distributed
from harness.small_llama import make_llama

ROWS = torch.randint(0, 17, (4, 12), generator=torch.Generator().manual_seed(1))
PRECISE = ["LlamaRMSNorm", "lm_head"]

needs_override = pytest.mark.skipif(is_torch_version("<", "2.15"), reason="torch has no dtype by parameter")


def prepare(model, precision="bf16", **plugin):
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = {"auto_wrap_policy": "transformer_based_wrap", "float32_modules": PRECISE} | plugin
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **plugin),
    )
    return accelerator, accelerator.prepare(model)


def is_precise(name):
    return "norm" in name or "lm_head" in name


def in_float32(module):
    forward = module.forward

    def precise(hidden):
        with torch.autocast("cpu", enabled=False):
            return forward(hidden.float())

    module.forward = precise


@needs_override
@distributed(world_size=2)
def test_outputs_and_gradients_are_those_of_one_process_with_the_same_dtypes():
    alone = make_llama()
    for name, parameter in alone.named_parameters():
        parameter.data = parameter.data if is_precise(name) else parameter.data.bfloat16()
    for name, module in alone.named_modules():
        if is_precise(name):
            in_float32(module)
    seen = {}
    accelerator, model = prepare(make_llama())
    for name, module in model.named_modules():
        if is_precise(name) or name.endswith("q_proj"):
            module.register_forward_hook(
                lambda module, _, output, name=name: seen.update({name: (module.weight.dtype, output.dtype)})
            )
    with torch.autocast("cpu", torch.bfloat16):
        expected = alone(ROWS).logits
    logits = model(ROWS).logits
    assert torch.equal(logits, expected)
    assert len(seen) == 8  # five norms, a head, two projections
    for name, (weight, output) in seen.items():
        assert weight is output is (torch.float32 if is_precise(name) else torch.bfloat16)
    accelerator.backward(logits.square().mean())
    expected.square().mean().backward()
    own = dict(alone.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.dtype is parameter.grad.dtype is torch.float32
        full, wanted = parameter.grad.full_tensor(), own[name].grad.float()
        torch.testing.assert_close(full, wanted, rtol=1e-2, atol=1e-5)


@needs_override
@distributed(world_size=2)
def test_options_without_effect_are_refused_by_name():
    with pytest.raises(SettingsError, match=r"float32_modules=\['LlamaRMSNorm', 'lm_head'\].* no effect"):
        prepare(make_llama(), precision="no")
    with pytest.raises(SettingsError, match=r"no module whose class or full name is 'router'"):
        prepare(make_llama(), float32_modules="router")
    frozen = make_llama().bfloat16().requires_grad_(requires_grad=False)
    with pytest.raises(SettingsError, match=r"'.*norm.weight' is in torch.bfloat16, and stays so"):
        prepare(frozen)
    with pytest.raises(SettingsError, match=r"float32_modules.*None with fsdp_version=1"):
        FullyShardedDataParallelPlugin(fsdp_version=1, float32_modules=PRECISE)
