"""Optimizers that know shards, losses in chunks and axes of parallelism on GPUs."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from accel_ops.tree import local_part
from accel_plugins import TilingKwargs
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.optimizers.host_adamw import HostAdamW
from accel_plugins.optimizers.muon import Muon
from accel_state.accelerator_state import AcceleratorState
from accel_train import Accelerator

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("axes_program.py")
WIDTH, LAYERS, STEPS = 1024, 8, 4


def make_layers(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)


def inputs_of(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(32, WIDTH, generator=generator).to(device, dtype)


def accelerate(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    return Accelerator(**options)


@contextmanager
def group_of_one() -> Iterator[None]:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator: Any, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - inputs).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_alone(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], inputs: torch.Tensor
) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - inputs).float().square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def peak(step: Callable[[], object]) -> int:
    """Bytes that a step has allocated at most, with all that is alive."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def test_host_adamw_steps_as_adamw_of_the_master_weights_and_begins_in_the_backward_pass() -> None:
    accelerator = accelerate()
    made = make_layers(torch.bfloat16)
    model, optimizer = accelerator.prepare(made, HostAdamW(made.parameters(), lr=1e-2))
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    alone = torch.optim.AdamW(masters, lr=1e-2)
    inputs = inputs_of(accelerator.device, torch.bfloat16)
    for step in range(STEPS):
        accelerator.backward((model(inputs) - inputs).float().square().mean())
        if step:  # the first one finds out whether it may
            with pytest.raises(RuntimeError, match="without step"):
                optimizer.optimizer.zero_grad()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad.float()
        alone.step()
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            state = optimizer.state[parameter]
            assert {state[key].device.type for key in ("master", "exp_avg", "exp_avg_sq")} == {"cpu"}
            torch.testing.assert_close(state["master"], master.detach().cpu(), rtol=1e-4, atol=1e-6)
            assert torch.equal(parameter.detach().cpu(), state["master"].bfloat16())


def test_host_adamw_takes_at_most_half_of_the_memory_of_adamw() -> None:
    peaks = {}
    for kind, dtype in ((torch.optim.AdamW, torch.float32), (HostAdamW, torch.bfloat16)):
        accelerator = accelerate()
        made = make_layers(dtype)
        model, optimizer = accelerator.prepare(made, kind(made.parameters(), lr=1e-3))
        inputs = inputs_of(accelerator.device, dtype)
        train(accelerator, model, optimizer, inputs)
        before = torch.cuda.memory_allocated()
        peaks[kind] = peak(lambda a=accelerator, m=model, o=optimizer, x=inputs: train(a, m, o, x))
        print(f"{kind.__name__}: {before / 1e6:.1f} MB between steps, at most {peaks[kind] / 1e6:.1f} MB")
        accelerator.free_memory()
        del made, model, optimizer
        torch.cuda.empty_cache()
    assert peaks[HostAdamW] <= peaks[torch.optim.AdamW] / 2


@pytest.mark.parametrize("is_sharded", [False, True])
def test_muon_steps_as_torchs(is_sharded: bool) -> None:
    options: dict[str, Any] = {"lr": 2e-2, "momentum": 0.9}
    with group_of_one():
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = accelerate(fsdp_plugin=plugin) if is_sharded else accelerate()
        made = make_layers()
        alone = copy.deepcopy(made).to(accelerator.device)
        model, optimizer = accelerator.prepare(made, Muon(made, **options, adamw={"lr": 1e-3}))
        inputs = inputs_of(accelerator.device)
        matrices = [parameter for parameter in alone.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in alone.parameters() if parameter.ndim != 2]
        both = [torch.optim.Muon(matrices, **options), torch.optim.AdamW(others, lr=1e-3)]
        expected = train_alone(alone, both, inputs)
        torch.testing.assert_close(train(accelerator, model, optimizer, inputs), expected, rtol=1e-3, atol=0)
        for parameter, right in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(local_part(parameter.detach()), right.detach(), rtol=1e-2, atol=1e-4)


def test_a_loss_in_chunks_takes_at_most_half_of_the_memory() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    plain: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32_000))
    found = {}
    for name, handlers in (("plain", []), ("chunks", [TilingKwargs(loss_chunk_size=512)])):
        accelerator = accelerate(kwargs_handlers=handlers)
        model = accelerator.prepare(copy.deepcopy(plain)).train()
        tokens = torch.arange(4096, device=accelerator.device)[None] % 31_991

        def step(model: Any = model, accelerator: Any = accelerator, tokens: Any = tokens) -> None:
            model.zero_grad()
            accelerator.backward(model(input_ids=tokens, labels=tokens, use_cache=False).loss)

        step()
        most = peak(step)
        gradients = [parameter.grad.cpu() for parameter in model.parameters()]
        found[name] = most, gradients
        print(f"{name}: at most {most / 1e6:.1f} MB")
        accelerator.free_memory()
        del model, step
        torch.cuda.empty_cache()
    torch.testing.assert_close(found["chunks"][1], found["plain"][1], rtol=1e-3, atol=1e-5)
    assert found["chunks"][0] <= found["plain"][0] / 2


def test_a_model_that_is_sharded_on_a_mesh_of_one_rank_is_taken_as_it_is() -> None:
    with group_of_one():
        accelerator = accelerate()
        device = accelerator.device
        mesh = init_device_mesh(device.type, (1, 1), mesh_dim_names=("data", "tp"))
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
        alone = copy.deepcopy(made)
        parallelize_module(made, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(made, mesh=mesh["data"])
        model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-3))
        assert model is made
        inputs = inputs_of(device)
        expected = train_alone(alone, [torch.optim.AdamW(alone.parameters(), lr=1e-3)], inputs)
        torch.testing.assert_close(train(accelerator, model, optimizer, inputs), expected, rtol=1e-4, atol=0)


AXES: dict[str, tuple[dict[str, int], str]] = {
    "tp": ({"tp_size": 2}, "sdpa"),
    "sp": ({"sp_size": 2}, "sdpa"),
    "sp, flex attention": ({"sp_size": 2}, "flex_attention"),
    "ep": ({"dp_shard_size": 2, "ep_size": 2}, "sdpa"),
    "pp": ({"pp_size": 2}, "sdpa"),
}


def run(where: str, axis: str) -> str:
    sizes, attention = AXES[axis]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), where, json.dumps(sizes), attention],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.parametrize("axis", AXES)
def test_two_gpus_along_an_axis_train_as_one(axis: str) -> None:
    if torch.accelerator.device_count() < 2:
        pytest.skip("an axis of two ranks needs two GPUs")
    print(run("accelerator", axis))
