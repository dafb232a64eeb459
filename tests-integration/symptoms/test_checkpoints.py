"""The field's symptoms of checkpoints: rows 12, 14, 16, 17, 18 and 25."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import InitProcessGroupKwargs
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import DistributedOperationException
from accel_train import Accelerator
from accel_train.checkpoint.single_files import load_fsdp_optimizer, save_fsdp_optimizer
from harness import distributed

MEGABYTE = 1_000_000


def make(version, *, precision="no", form="SHARDED_STATE_DICT"):
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))


def step(accelerator, model, optimizer, times=1):
    """Train, and return the full weights."""
    rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(times):
        accelerator.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_row_12_a_sharded_state_is_loaded_right_after_it_was_saved(version, tmp_path):
    run = make(version)
    saved = step(*run, times=2)
    run[0].save_state(tmp_path / "here", flush=False)
    run[0].load_state(tmp_path / "here")
    assert all(torch.equal(value, saved[name]) for name, value in step(*run, times=0).items())
    wanted = step(*run, times=2)
    run[0].load_state(tmp_path / "here")
    assert all(torch.equal(value, wanted[name]) for name, value in step(*run, times=2).items())


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=2)
def test_row_14_loading_leaves_the_loss_scale_as_it_was_saved(form, tmp_path):
    accelerator, model, optimizer = run = make(2, precision="fp16", form=form)
    step(*run, times=3)
    saved = accelerator.scaler.state_dict()
    assert saved["_growth_tracker"] == 3
    accelerator.save_state(tmp_path / "here", flush=False)
    plugin = accelerator.state.fsdp_plugin
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "alone")
    step(*run)
    assert accelerator.scaler.state_dict() != saved
    accelerator.load_state(tmp_path / "here")
    assert accelerator.scaler.state_dict() == saved
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "alone")
    assert accelerator.scaler.state_dict() == saved
    assert not accelerator.optimizer_step_was_skipped
    step(*run)
    assert accelerator.scaler.state_dict()["_growth_tracker"] == 4


def resident(*, restart=False):
    """Return the most bytes that were resident since the last restart."""
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


@distributed(world_size=2)
def test_row_16_saving_a_sharded_model_takes_the_memory_of_one_file(tmp_path):
    AcceleratorState._reset_state(True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1000
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))
    size = sum(parameter.nbytes for parameter in model.parameters())
    model = accelerator.prepare(model)
    accelerator.save_model(nn.Linear(2, 2), tmp_path / "small")  # imports what a save needs
    dist.barrier()
    before = resident(restart=True)
    accelerator.save_model(model, tmp_path / "large", max_shard_size="16MB")
    grown = resident() - before
    dist.barrier()  # the main process writes
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > size // (20 * MEGABYTE)
    assert grown < size / 2, (
        f"rank {dist.get_rank()} grew by {grown / MEGABYTE:.0f} MB of {size / MEGABYTE:.0f}"
    )


@distributed(world_size=2)
def test_row_17_a_model_that_rank_0_sends_is_not_loaded_by_the_others(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations.fsdp import is_fsdp_enabled

    AcceleratorState._reset_state(True)
    with patch.dict(os.environ):  # the plugin tells transformers by variables
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=True)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert is_fsdp_enabled()  # as transformers sees it
        shape = {"num_attention_heads": 4, "num_hidden_layers": 4}
        small = LlamaConfig(hidden_size=8, intermediate_size=8, vocab_size=8, **shape)
        large = LlamaConfig(hidden_size=512, intermediate_size=2048, vocab_size=4000, **shape)
        if accelerator.is_main_process:
            for name, config in (("small", small), ("large", large)):
                LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        dist.barrier()
        LlamaForCausalLM.from_pretrained(tmp_path / "small")  # imports what loading needs
        before = resident(restart=True)
        model = LlamaForCausalLM.from_pretrained(tmp_path / "large")
        grown, size = resident() - before, sum(parameter.nbytes for parameter in model.parameters())
        assert size > 60 * MEGABYTE
        assert accelerator.is_main_process or grown < 0.2 * size, f"{grown / MEGABYTE:.0f} MB"


class Collectives(TorchDispatchMode):
    """Record the collectives of this thread, with the bytes of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in {"c10d", "_c10d_functional"}:
            tensors = torch.utils._pytree.tree_leaves(args)
            size = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
            self.calls.append((func.name(), size))
        return func(*args, **(kwargs or {}))


def check_collectives(folder):
    accelerator, model, optimizer = make(2)
    step(accelerator, model, optimizer)
    with Collectives() as seen:
        dist.all_reduce(torch.ones(2))
        accelerator.save_state(folder / "here", flush=False)
    assert seen.calls == [("c10d::allreduce_", 8)], "only that of this test"


@distributed(world_size=2)
def test_row_18_a_sharded_save_needs_no_collective_on_two_ranks(tmp_path):
    check_collectives(tmp_path)


@distributed(world_size=4)
def test_row_18_a_sharded_save_needs_no_collective_on_four_ranks(tmp_path):
    check_collectives(tmp_path)


@pytest.mark.parametrize(
    ("call", "seconds"), [("model(rows)  # hangs", 5), ("accelerator.backward(loss)", 1)]
)
@distributed(world_size=2, restart=True)
def test_row_25_a_save_on_one_rank_only_is_an_error_on_both_that_names_their_lines(call, seconds, tmp_path):
    lines = Path(__file__).read_text().splitlines()
    first, second = (
        next(index for index, line in enumerate(lines, 1) if line.strip() == text)
        for text in ('accelerator.save_state(tmp_path / "on one rank")', call)
    )
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=seconds))],
    )
    rows = torch.randn(4, 4)
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    loss = model(rows).square().mean()
    with pytest.raises(DistributedOperationException) as raised:  # noqa: PT012 - of one of the calls
        if accelerator.is_main_process:
            accelerator.save_state(tmp_path / "on one rank")
        elif call == "accelerator.backward(loss)":
            accelerator.backward(loss)
        else:
            model(rows)  # hangs
    for rank, line in enumerate((first, second)):
        assert re.search(rf"rank {rank} (is|has left) [^;]*test_checkpoints\.py:{line}\b", str(raised.value))


@pytest.mark.parametrize(("version", "call"), [(2, "get_state_dict"), (2, "save_model")])
@distributed(world_size=2, restart=True)
def test_a_model_that_one_rank_gathers_alone_is_an_error_on_both_that_names_their_lines(
    version, call, tmp_path
):
    lines = Path(__file__).read_text().splitlines()
    gathers = {
        "get_state_dict": "accelerator.get_state_dict(model)  # alone",
        "save_model": "accelerator.save_model(model, tmp_path)  # alone",
    }
    first, second = (
        next(index for index, line in enumerate(lines, 1) if line.strip() == text)
        for text in (gathers[call], "accelerator.backward(loss)  # of the others")
    )
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version),
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))],
    )
    model = accelerator.prepare(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    loss = model(torch.randn(4, 4)).square().mean()
    with pytest.raises(DistributedOperationException) as raised:  # noqa: PT012 - of one of the calls
        if not accelerator.is_main_process:
            accelerator.backward(loss)  # of the others
        elif call == "get_state_dict":
            accelerator.get_state_dict(model)  # alone
        else:
            accelerator.save_model(model, tmp_path)  # alone
    for rank, line in enumerate((first, second)):
        assert re.search(rf"rank {rank} (is|has left) [^;]*test_checkpoints\.py:{line}\b", str(raised.value))
