"""A checkpoint of any strategy on any number of ranks goes on under any other."""

from __future__ import annotations

import os
import pickle
import random
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from accel_plugins.deepspeed.plugin import DeepSpeedPlugin
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import DataLoaderConfiguration
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState, GradientState
from accel_state.errors import CheckpointError, CheckpointWriteError
from accel_state.rng import set_seed
from accel_train import Accelerator
from accel_train.checkpoint import files
from accel_train.checkpoint.single_files import merge_fsdp_weights
from harness import distributed
from harness.engines import deepspeed_process

STEPS = 3  # of every leg of a journey


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """An odd number of rows, a buffer, and blocks to shard."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 7)
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        self.tp_plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
        self.scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x)) * self.scale.sum()


def plugin_of(strategy: str, **options: object) -> dict:
    if strategy in {"single", "ddp"}:
        return {}
    if strategy == "tp":
        return {"parallelism_config": ParallelismConfig(tp_size=2)}
    if strategy.startswith("zero"):
        return {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=int(strategy[4]))}
    chosen = {
        "fsdp_version": int(strategy[4]),
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**(chosen | options))}


def build(strategy: str, **options: object) -> tuple:
    """An accelerator, with a model, an optimizer with two groups, and a loader of four rows for all ranks."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    config = DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=True, data_seed=3, resume_mid_epoch=True
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config, **plugin_of(strategy, **options))
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    data = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    return (accelerator, *prepared)


def train(run: tuple, steps: int = STEPS, save_to: Path | None = None) -> None:
    """Train some batches of an epoch; save after the last, while the loader knows where it is."""
    accelerator, model, optimizer, loader, schedule = run
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        schedule.scheduler.step()
        optimizer.zero_grad()
        steps -= 1
        if not steps:
            if save_to is not None:
                accelerator.save_state(save_to)
            break


def whole(run: tuple) -> dict[str, torch.Tensor]:
    accelerator, model = run[:2]
    state = accelerator._parts.strategy.states.full_state_dict(model)
    return {name: value.detach().clone() for name, value in state.items()}


def one_leg(strategy: str, folder: Path, leg: int) -> None:
    with deepspeed_process() if strategy.startswith("zero") else nullcontext():
        run = build(strategy)
        if leg:
            run[0].load_state(folder / f"leg{leg - 1}")
        train(run, save_to=folder / f"leg{leg}")
        state = whole(run)
        if run[0].is_main_process:
            torch.save(state, folder / "state.pt")
        run[0].wait_for_everyone()
        run[0].free_memory()


@distributed(world_size=2)
def leg_on_two(strategy: str, folder: Path, leg: int) -> None:
    one_leg(strategy, folder, leg)


@distributed(world_size=4)
def leg_on_four(strategy: str, folder: Path, leg: int) -> None:
    one_leg(strategy, folder, leg)


def leg_on_one(strategy: str, folder: Path, leg: int) -> None:
    try:
        one_leg(strategy, folder, leg)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


LEGS = {1: leg_on_one, 2: leg_on_two, 4: leg_on_four}


@pytest.mark.parametrize(
    "journey",
    [
        ("fsdp2@4", "ddp@2", "zero3@2", "single@1"),
        ("tp@2", "fsdp2@4", "zero2@2", "tp@2", "single@1", "fsdp2@2"),
        ("fsdp1@2", "fsdp2@4", "fsdp1@4", "single@1"),
        ("single@1", "fsdp1@2", "ddp@2", "fsdp2@2"),
    ],
    ids=">".join,
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_goes_on_under_another_strategy_and_number_of_ranks(journey: tuple, tmp_path: Path) -> None:
    for leg, stop in enumerate(journey):
        strategy, _, world = stop.partition("@")
        LEGS[int(world)](strategy=strategy, folder=tmp_path, leg=leg)
    found = torch.load(tmp_path / "state.pt")
    try:
        undisturbed = build("single")
        train(undisturbed, STEPS * len(journey))
        right = whole(undisturbed)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


def contents(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
@distributed(world_size=2)
def test_every_rank_writes_its_part(strategy: str, blocking: bool, tmp_path: Path) -> None:
    run = build(strategy)
    train(run)
    saving = run[0].save_state(tmp_path / "here", blocking=blocking)
    before = whole(run)
    if not blocking:
        train(run)  # what is saved is what was there when it was called for
        saving.wait()
    run[0].wait_for_everyone()
    names = contents(tmp_path / "here")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        assert {f"{folder}/.metadata", f"{folder}/__0_0.distcp", f"{folder}/__1_0.distcp"} <= names
    assert not [name for name in names if name.endswith((".note", ".safetensors")) or name == "optimizer.bin"]
    again = build(strategy)
    again[0].load_state(tmp_path / "here")
    after = whole(again)
    assert all(torch.equal(after[name], value) for name, value in before.items())


@distributed(world_size=2)
def test_tensor_parallel_ranks_that_read_states_of_other_ranks_draw_the_same_numbers(tmp_path: Path) -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    accelerator, *_ = build("fsdp2")
    set_seed(7, device_specific=True)
    accelerator.save_state(str(tmp_path / "saved"))
    first = numbers()
    accelerator, *_ = build("tp")
    accelerator.load_state(str(tmp_path / "saved"))
    drawn: list = [None, None]
    dist.all_gather_object(drawn, (numbers(), first))
    assert drawn[0][0] == drawn[0][1] == drawn[1][0] != drawn[1][1]


@distributed(world_size=2)
def test_torch_itself_reads_the_folders(tmp_path: Path) -> None:
    run = build("fsdp2")
    train(run)
    run[0].save_state(tmp_path / "here")
    right = whole(run)
    if dist.get_rank() == 0:
        dcp_to_torch_save(tmp_path / "here" / "pytorch_model_fsdp_0", tmp_path / "whole.pt")
        found = torch.load(tmp_path / "whole.pt")["model"]
        assert all(torch.equal(found[name], value) for name, value in right.items())
    dist.barrier()


@distributed(world_size=2)
def test_a_newer_checkpoint_takes_the_place_of_an_older_one_of_another_form(tmp_path: Path) -> None:
    for strategy in ("fsdp2", "ddp", "fsdp2"):
        run = build(strategy)
        train(run)
        (tmp_path / "here").mkdir(exist_ok=True)
        run[0].save_state(tmp_path / "here")
        right = whole(run)
    names = contents(tmp_path / "here")
    assert "model.safetensors" not in names
    assert "pytorch_model_fsdp_0/.metadata" in names
    run[0].load_state(tmp_path / "here")
    assert all(torch.equal(value, right[name]) for name, value in whole(run).items())


@distributed(world_size=2)
def test_a_full_state_dict_is_asked_for_at_any_time(tmp_path: Path) -> None:
    run = build("fsdp2")
    train(run)
    run[0].state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    run[0].save_state(tmp_path / "here")
    names = contents(tmp_path / "here")
    assert {"model.safetensors", "optimizer.bin"} <= names
    assert not [name for name in names if name.endswith(".distcp")]


@pytest.mark.parametrize("safe", [True, False])
@distributed(world_size=2)
def test_shards_are_merged_into_one_file(safe: bool, tmp_path: Path) -> None:
    run = build("fsdp2")
    run[0].save_state(tmp_path / "here")
    merge_fsdp_weights(
        tmp_path / "here", tmp_path / "merged", safe_serialization=safe, remove_checkpoint_dir=True
    )
    model = Net()
    right = whole(run)
    if safe:
        model.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    else:
        model.load_state_dict(torch.load(tmp_path / "merged" / "pytorch_model.bin"))
    assert all(torch.equal(value, right[name]) for name, value in model.state_dict().items())
    assert not (tmp_path / "here" / "pytorch_model_fsdp_0").exists()
    assert [path.name for path in (tmp_path / "merged").iterdir()] == [
        "model.safetensors" if safe else "pytorch_model.bin"
    ]


@distributed(world_size=2)
def test_every_rank_raises_the_error_of_the_one_that_merges(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no shards of a model"):
        merge_fsdp_weights(tmp_path, tmp_path / "merged")


class Bomb:
    def __reduce__(self) -> tuple:
        return (print, ("this must not run",))


@distributed(world_size=2)
def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    run = build("fsdp2")
    run[0].save_state(tmp_path / "here")
    index = tmp_path / "here" / "pytorch_model_fsdp_0" / ".metadata"
    dist.barrier()
    if dist.get_rank() == 0:
        index.write_bytes(pickle.dumps(Bomb()))
        (tmp_path / "here" / "accel_manifest.json").unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"builtins.print is not allowed in this file"):
        run[0].load_state(tmp_path / "here")


@distributed(world_size=2)
def test_a_shard_that_was_cut_off_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    run = build("fsdp2")
    train(run)
    run[0].save_state(tmp_path / "here")
    shard = tmp_path / "here" / "optimizer_0" / "__1_0.distcp"
    dist.barrier()
    if dist.get_rank() == 0:
        shard.write_bytes(shard.read_bytes()[:-1])
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"'optimizer_0/__1_0.distcp' has \d+ bytes, not"):
        run[0].load_state(tmp_path / "here")


@distributed(world_size=2)
def test_another_model_is_refused_by_the_name_of_what_differs(tmp_path: Path) -> None:
    run = build("fsdp2")
    run[0].save_state(tmp_path / "here")
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True, **plugin_of("fsdp2", auto_wrap_policy="no_wrap"))
    model = nn.Sequential(nn.Linear(3, 7))
    model = accelerator.prepare(model)
    with pytest.raises(CheckpointError, match=r"pytorch_model_fsdp_0' has 'blocks.0.down.bias', which"):
        accelerator.load_state(tmp_path / "here")


class FullDisk:
    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def write(self, descriptor: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")


@distributed(world_size=2)
def test_a_full_disk_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    run = build("fsdp2")
    run[0].save_state(tmp_path / "here")
    before = whole(run)
    train(run)
    real = files.os
    if dist.get_rank() == 1:
        files.os = FullDisk()
    try:
        with pytest.raises(
            CheckpointWriteError, match=r"rank 1 could not write 'pytorch_model_fsdp_0/__1_0.distcp'"
        ):
            run[0].save_state(tmp_path / "here")
    finally:
        files.os = real
    dist.barrier()
    run[0].load_state(tmp_path / "here")
    assert all(torch.equal(value, before[name]) for name, value in whole(run).items())
