"""Models that were loaded in a small format train on float32 under FSDP with mixed precision."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import GradScalerKwargs
from accel_state.environ import patch_environment
from accel_train import Accelerator
from harness import distributed


class Net(nn.Module):
    """A frozen block beside trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(requires_grad=False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)))


def prepare(version, dtype, precision="bf16", **options):
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, auto_wrap_policy=choose_frozen if version == 1 else None, **options
    )
    scaling = [GradScalerKwargs(init_scale=8.0)] if precision == "fp16" else None
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin, mixed_precision=precision, kwargs_handlers=scaling
    )
    torch.manual_seed(0)
    model = Net().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    return accelerator, *accelerator.prepare(model, optimizer)


def choose_frozen(module, recurse, nonwrapped_numel):
    """FSDP1 makes one tensor of what it wraps together."""
    return True if recurse else isinstance(module, nn.Linear) and not module.weight.requires_grad


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_small_steps_are_not_lost_to_the_format_that_was_loaded(version):
    accelerator, model, optimizer = prepare(version, torch.bfloat16)
    before = accelerator.get_state_dict(model)
    dtypes = {name: tensor.dtype for name, tensor in before.items()}
    if accelerator.is_main_process:
        assert dtypes == {
            "first.weight": torch.float32,
            "first.bias": torch.float32,
            "frozen.weight": torch.bfloat16,
            "frozen.bias": torch.bfloat16,
            "last.weight": torch.float32,
            "last.bias": torch.float32,
            "scale": torch.bfloat16,
            "count": torch.int64,
        }
    assert all(
        p.dtype is torch.float32
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    )
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    after = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        change = after["last.bias"] - before["last.bias"]
        torch.testing.assert_close(change, torch.full((4,), -(2.0**-11)), rtol=1e-2, atol=0)
        assert torch.equal(after["frozen.weight"], before["frozen.weight"])


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_a_model_in_float16_can_be_trained_with_loss_scaling(version):
    accelerator, model, optimizer = prepare(version, torch.float16, "fp16")
    accelerator.backward(model(torch.ones(2, 4)).sum())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert state["first.weight"].dtype is torch.float32
        assert state["frozen.weight"].dtype is torch.float16


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_without_mixed_precision_the_format_that_was_loaded_is_trained(version):
    accelerator, model, _ = prepare(version, torch.bfloat16, "no")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        assert {tensor.dtype for name, tensor in state.items() if name != "count"} == {torch.bfloat16}


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_it_is_said_once_by_the_main_process(version):
    told: list[str] = []
    recorder = logging.Handler()
    recorder.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("accel_plugins.sharding.wrap")
    logger.addHandler(recorder)
    try:
        accelerator, *_ = prepare(version, torch.bfloat16)
    finally:
        logger.removeHandler(recorder)
    assert len(told) == int(accelerator.is_main_process)
    for message in told:
        assert "3 parameters of Net" in message
        assert "mixed_precision='bf16'" in message


@distributed(world_size=2)
def test_only_the_main_process_needs_the_values():
    with patch_environment(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
        torch.manual_seed(0)
        with torch.device("cpu" if accelerator.is_main_process else "meta"):
            model = Net().to(torch.bfloat16)
        right = model.first.weight.detach().float()
        model = accelerator.prepare(model)
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            assert torch.equal(state["first.weight"], right)
            assert state["first.weight"].dtype is torch.float32


@distributed(world_size=2)
def test_the_state_of_an_optimizer_that_has_stepped_follows():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, mixed_precision="bf16")
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    model, optimizer = accelerator.prepare(model, optimizer)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
