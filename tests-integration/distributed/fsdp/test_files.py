"""The documented functions that save and load one sharded model or optimizer, in every form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.errors import CheckpointError, CheckpointWriteError, SettingsError
from accel_train import Accelerator
from accel_train.checkpoint.single_files import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from harness import distributed

# Version, form, `use_dcp`, and what a second model and optimizer are called then.
FORMS = [
    (1, "FULL_STATE_DICT", True, {"pytorch_model_fsdp_1.bin", "optimizer_1.bin"}),
    (1, "SHARDED_STATE_DICT", True, {"pytorch_model_fsdp_1", "optimizer_1"}),
    (1, "LOCAL_STATE_DICT", True, {"pytorch_model_fsdp_1", "optimizer_1"}),
    (2, "FULL_STATE_DICT", True, {"pytorch_model_fsdp_1.bin", "optimizer_1.bin"}),
    (2, "SHARDED_STATE_DICT", True, {"pytorch_model_fsdp_1", "optimizer_1"}),
    (2, "SHARDED_STATE_DICT", False, {"pytorch_model_fsdp_1", "optimizer_1"}),
]


def make(version, form, seed=0):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=form)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return plugin, accelerator, *accelerator.prepare(model, optimizer)


def step(accelerator, model, optimizer, times=1):
    inputs = torch.ones(2, 3) * (1 + dist.get_rank())
    for _ in range(times):
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator._parts.strategy.states.full_state_dict(model)
    return {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=2)
def test_a_hook_that_fails_on_one_rank_fails_on_all(form, tmp_path):
    _, accelerator, model, optimizer = make(2, form)
    step(accelerator, model, optimizer)
    accelerator.save_state(tmp_path / "right")

    def fail(*_):
        if dist.get_rank() == 1:
            raise ValueError("of this hook")

    saving = accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(CheckpointWriteError, match=r"rank 1 failed before writing.*of this hook"):
        accelerator.save_state(tmp_path / "wrong")
    saving.remove()
    accelerator.register_load_state_pre_hook(fail)
    with pytest.raises(ValueError if dist.get_rank() == 1 else CheckpointError, match="of this hook"):
        accelerator.load_state(tmp_path / "right")


@pytest.mark.parametrize(
    ("version", "form", "use_dcp", "names"), FORMS, ids=lambda one: "names" if isinstance(one, set) else None
)
@distributed(world_size=2)
def test_what_was_saved_goes_on_as_if_nothing_had_happened(version, form, use_dcp, names, tmp_path):
    plugin, accelerator, model, optimizer = make(version, form)
    step(accelerator, model, optimizer, times=2)
    save_fsdp_model(plugin, accelerator, model, tmp_path / "here", model_index=1, use_dcp=use_dcp)
    save_fsdp_optimizer(
        plugin, accelerator, optimizer, model, tmp_path / "here", optimizer_index=1, use_dcp=use_dcp
    )
    right = step(accelerator, model, optimizer, times=2)
    assert {path.name for path in (tmp_path / "here").iterdir()} == names
    plugin, accelerator, model, optimizer = make(version, form, seed=1)
    step(accelerator, model, optimizer)
    load_fsdp_model(plugin, accelerator, model, tmp_path / "here", model_index=1, use_dcp=use_dcp)
    load_fsdp_optimizer(
        plugin, accelerator, optimizer, model, tmp_path / "here", optimizer_index=1, use_dcp=use_dcp
    )
    for name, value in step(accelerator, model, optimizer, times=2).items():
        assert torch.equal(value, right[name]), name


@distributed(world_size=2)
def test_shards_of_one_version_are_read_by_the_other(tmp_path):
    for version, other in ((1, 2), (2, 1)):
        folder = tmp_path / str(version)
        plugin, accelerator, model, optimizer = make(version, "SHARDED_STATE_DICT")
        step(accelerator, model, optimizer, times=2)
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        right = step(accelerator, model, optimizer)
        accelerator.state._reset_state()
        plugin, accelerator, model, optimizer = make(other, "SHARDED_STATE_DICT", seed=1)
        load_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
        for name, value in step(accelerator, model, optimizer).items():
            torch.testing.assert_close(value, right[name], rtol=0, atol=1e-6)
        accelerator.state._reset_state()


@distributed(world_size=2)
def test_a_folder_of_shards_that_is_saved_to_again_keeps_its_other_files(tmp_path):
    plugin, accelerator, model, optimizer = make(2, "SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, tmp_path)
    (tmp_path / "pytorch_model_fsdp_0" / "notes.txt").write_text("mine")
    right = step(accelerator, model, optimizer)
    save_fsdp_model(plugin, accelerator, model, tmp_path)
    step(accelerator, model, optimizer)
    load_fsdp_model(plugin, accelerator, model, tmp_path)
    torch.testing.assert_close(accelerator._parts.strategy.states.full_state_dict(model), right)
    assert (tmp_path / "pytorch_model_fsdp_0" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=2)
def test_what_is_not_there_or_does_not_fit_is_named_on_every_rank(form, tmp_path):
    plugin, accelerator, model, optimizer = make(2, form)
    for load in (
        lambda: load_fsdp_model(plugin, accelerator, model, tmp_path / "nowhere"),
        lambda: load_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "nowhere"),
    ):
        with pytest.raises(CheckpointError, match="nowhere"):
            load()
    save_fsdp_model(plugin, accelerator, model, tmp_path / "here")
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "here")
    other = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    other = accelerator.prepare(other)
    with pytest.raises((CheckpointError, RuntimeError), match=r"(?s)0\.weight.*5, 3.*4, 3"):
        load_fsdp_model(plugin, accelerator, other, tmp_path / "here")


@distributed(world_size=2)
def test_of_a_model_without_adapter_all_is_saved_and_loaded_strictly(tmp_path):
    plugin, accelerator, model, optimizer = make(2, "FULL_STATE_DICT")
    step(accelerator, model, optimizer)
    saved = accelerator.get_state_dict(model)
    save_fsdp_model(plugin, accelerator, model, tmp_path, adapter_only=True)
    step(accelerator, model, optimizer)
    load_fsdp_model(plugin, accelerator, model, tmp_path, adapter_only=True)
    torch.testing.assert_close(accelerator.get_state_dict(model), saved)
    other = accelerator.prepare(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)))
    with pytest.raises((CheckpointError, RuntimeError)):
        load_fsdp_model(plugin, accelerator, other, tmp_path, adapter_only=True)


@distributed(world_size=2)
def test_a_strategy_without_shards_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(SettingsError, match=r"'ddp' does not shard anything. Use save_state"):
        save_fsdp_model(plugin, accelerator, model, tmp_path)


@pytest.mark.parametrize("form", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@distributed(world_size=2)
def test_an_error_on_one_rank_is_an_error_on_all(form, tmp_path):
    plugin, accelerator, model, optimizer = make(2, form)
    step(accelerator, model, optimizer)
    save_fsdp_model(plugin, accelerator, model, tmp_path / "here")
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "here")
    blocked, of_rank = tmp_path / "file", dist.get_rank()
    blocked.write_text("not a folder")
    mine = blocked if of_rank == 0 else tmp_path / "other"
    for call in (
        lambda: save_fsdp_model(plugin, accelerator, model, mine / "inner"),
        lambda: save_fsdp_optimizer(plugin, accelerator, optimizer, model, mine / "inner"),
    ):
        with pytest.raises(OSError if of_rank == 0 else CheckpointWriteError, match="file"):
            call()
    nowhere = tmp_path / ("here" if of_rank == 0 else "nowhere")
    for load in (
        lambda: load_fsdp_model(plugin, accelerator, model, nowhere),
        lambda: load_fsdp_optimizer(plugin, accelerator, optimizer, model, nowhere),
    ):
        with pytest.raises(CheckpointError, match="nowhere"):
            load()
    step(accelerator, model, optimizer)


@pytest.mark.parametrize("version", [1, 2])
@distributed(world_size=2)
def test_numbers_of_numpy_in_the_groups_of_a_sharded_optimizer(version, tmp_path):
    plugin, accelerator, model, optimizer = make(version, "SHARDED_STATE_DICT")
    step(accelerator, model, optimizer)
    rate = np.float64(0.25)
    optimizer.param_groups[0]["lr"] = rate
    accelerator.save_state(tmp_path / "state")
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "one")
    for load in (
        lambda: accelerator.load_state(tmp_path / "state"),
        lambda: load_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path / "one"),
    ):
        optimizer.param_groups[0]["lr"] = 0.5
        load()
        assert optimizer.param_groups[0]["lr"] == rate
