"""Saving and loading the state of a run, on one process."""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pickle
import random
import re
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn

from accel_plugins.kwargs import DataLoaderConfiguration, ProjectConfiguration
from accel_plugins.sharding.shards import ShardedStates
from accel_plugins.sharding.state import StateForm
from accel_state.errors import CheckpointError, CheckpointWriteError, SettingsError
from accel_state.process_group import clone_store
from accel_train import Accelerator, load_custom_state, save_custom_state
from accel_train.checkpoint import files
from accel_train.checkpoint.save import Saving
from accel_train.checkpoint.single_files import (
    load_accelerator_state,
    merge_fsdp_weights,
    save_accelerator_state,
)


def listing(folder):
    return sorted(entry.name for entry in Path(folder).iterdir())


class Counter:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Setup:
    """A small run: tied weights, momentum, a schedule, shuffled data."""

    def __init__(self, folder=None, *, limit=None, numbered=True, **project):
        config = ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=numbered, total_limit=limit, **project
        )
        self.accelerator = Accelerator(
            cpu=True, project_config=config, dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = torch.randn(16, 4)
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def train(self, batches):
        for batch, _ in zip(self.loader, range(batches), strict=False):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def same(left, right):
    return torch.equal(left.weights(), right.weights())


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("blocking", [True, False])
def test_a_resumed_run_ends_like_the_undisturbed_one(tmp_path, safe, blocking):
    whole = Setup(tmp_path / "whole")
    whole.train(4)
    whole.train(3)

    first = Setup(tmp_path / "run")
    first.train(4)
    saved = first.accelerator.save_state(safe_serialization=safe, blocking=blocking)
    first.train(1)  # lost
    if not blocking:
        saved.wait()
    second = Setup(tmp_path / "run")
    torch.manual_seed(99)
    assert second.accelerator.has_checkpoint
    second.accelerator.load_state()
    second.train(3)
    assert same(whole, second)
    assert whole.schedule.get_last_lr() == second.schedule.get_last_lr()


def test_a_run_goes_on_in_the_middle_of_an_epoch(tmp_path):
    first = Setup(tmp_path)
    seen = []
    for batch in first.loader:
        seen.append(batch)
        if len(seen) == 2:
            first.accelerator.save_state()
    second = Setup(tmp_path)
    second.accelerator.load_state()
    assert torch.equal(torch.cat(list(second.loader)), torch.cat(seen[2:]))


def test_files_have_the_names_that_the_field_knows(tmp_path):
    run = Setup(tmp_path, numbered=False)
    run.accelerator.register_for_checkpointing(Counter())
    run.accelerator.prepare(nn.Linear(1, 1))
    run.train(1)
    assert run.accelerator.save_state(tmp_path / "here") == str(tmp_path / "here")
    assert listing(tmp_path / "here") == [
        "accel_manifest.json",
        "custom_checkpoint_0.pkl",
        "data_position_0.bin",
        "model.safetensors",
        "model_1.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
        "scheduler.bin",
    ]
    manifest = json.loads((tmp_path / "here" / "accel_manifest.json").read_text())
    assert (manifest["format"], manifest["world_size"], manifest["step"]) == (1, 1, 0)
    for name, record in manifest["files"].items():
        assert record["size"] == (tmp_path / "here" / name).stat().st_size


def test_the_step_is_in_the_manifest_and_not_among_the_random_numbers(tmp_path, told):
    run = Setup(tmp_path)
    run.accelerator.gradient_accumulation_steps = 3
    with run.accelerator.accumulate():
        pass
    path = run.accelerator.save_state()
    assert "1 micro-batch(es) after the last optimizer step" in told.text
    states = torch.load(f"{path}/random_states_0.pkl", weights_only=False)
    assert "step" not in states
    again = Setup(tmp_path)
    again.accelerator.load_state()
    assert again.accelerator.step == 1


def test_python_numpy_and_torch_draw_on(tmp_path):
    run = Setup(tmp_path)
    run.accelerator.save_state()
    drawn = random.random(), np.random.rand(), torch.rand(()).item()
    run.accelerator.load_state()
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


def test_a_generator_that_does_not_come_back_is_named(tmp_path, told):
    run = Setup(tmp_path, numbered=False)
    path = run.accelerator.save_state(tmp_path / "c")
    (tmp_path / "c" / "accel_manifest.json").unlink()
    name = tmp_path / "c" / "random_states_0.pkl"
    states = torch.load(name, weights_only=False)
    del states["numpy_random_seed"]
    more = {"torch_xpu_manual_seed": [torch.zeros(1)], "torch_npu_manual_seed": []}  # no device, no state
    torch.save(states | more, name)
    run.accelerator.load_state(path)
    assert "'numpy_random_seed' is absent" in told.text
    assert "'torch_xpu_manual_seed' is for devices that this machine lacks" in told.text
    assert "torch_npu_manual_seed" not in told.text


def test_only_the_limit_stays_and_numbers_go_on_after_a_restart(tmp_path):
    run = Setup(tmp_path, limit=2)
    for _ in range(4):
        run.accelerator.save_state()
    assert listing(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert run.accelerator.save_iteration == 4
    again = Setup(tmp_path, limit=2)
    again.accelerator.load_state()
    assert again.accelerator.save_iteration == 4
    again.accelerator.save_state()
    assert listing(tmp_path / "checkpoints") == ["checkpoint_3", "checkpoint_4"]


def test_a_numbered_checkpoint_of_an_earlier_run_is_not_overwritten(tmp_path):
    Setup(tmp_path).accelerator.save_state()
    run = Setup(tmp_path)
    with pytest.raises(SettingsError, match=r"checkpoint_0' already exists.*iteration=1"):
        run.accelerator.save_state()
    assert listing(tmp_path / "checkpoints") == ["checkpoint_0"]


def test_a_second_run_whose_numbers_are_smaller_is_refused(tmp_path):
    first = Setup(tmp_path, limit=2)
    for _ in range(4):
        first.accelerator.save_state()
    second = Setup(tmp_path, limit=2)
    with pytest.raises(SettingsError, match=r"checkpoint_3' already exists from an earlier run.*iteration=4"):
        second.accelerator.save_state()
    assert listing(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    second.train(1)
    second.accelerator.project_configuration.iteration = 4
    second.accelerator.save_state()
    assert listing(tmp_path / "checkpoints") == ["checkpoint_3", "checkpoint_4"]
    third = Setup(tmp_path, limit=2)
    third.accelerator.load_state()
    assert same(third, second)
    third.accelerator.load_state(
        tmp_path / "checkpoints" / "checkpoint_3"
    )  # and goes on with the next number
    assert third.accelerator.save_state().endswith("checkpoint_5")


@pytest.mark.parametrize("value", ["invalid", 1.5, ["cpu"]])
def test_a_map_location_that_is_none_is_named(tmp_path, value):
    run = Setup(tmp_path, numbered=False)
    run.accelerator.save_state(tmp_path / "c")
    objects = [run.model], [run.optimizer], [], []
    for load in (
        lambda: run.accelerator.load_state(tmp_path / "c", map_location=value),
        lambda: load_accelerator_state(tmp_path / "c", *objects, 0, map_location=value),
    ):
        with pytest.raises(TypeError, match=rf"map_location={re.escape(repr(value))}\): pass .*'on_device'"):
            load()
    for value in (None, "cpu", "on_device", torch.device("cpu")):
        run.accelerator.load_state(tmp_path / "c", map_location=value)


def test_an_output_dir_beside_numbering_is_named(tmp_path, told):
    path = Setup(tmp_path).accelerator.save_state("elsewhere")
    assert path == str(tmp_path / "checkpoints" / "checkpoint_0")
    assert "'elsewhere'" in told.text


def test_without_a_folder_or_numbering_the_way_out_is_said(tmp_path):
    run = Setup(tmp_path, numbered=False)
    assert not run.accelerator.has_checkpoint
    with pytest.raises(SettingsError, match=r"save_state.. needs an output_dir"):
        run.accelerator.save_state()
    with pytest.raises(SettingsError, match=r"load_state.. needs an input_dir"):
        run.accelerator.load_state()
    with pytest.raises(CheckpointError, match=r"there is no folder 'nowhere'"):
        run.accelerator.load_state("nowhere")
    with pytest.raises(TypeError, match=r"save_state.. got exclude_frozen"):
        run.accelerator.save_state(tmp_path / "x", exclude_frozen=True)


def test_numbering_needs_a_project_directory():
    with pytest.raises(SettingsError, match=r"needs a project_dir"):
        Setup(None).accelerator.save_state()


def test_without_any_checkpoint_load_state_says_so(tmp_path):
    run = Setup(tmp_path)
    assert not run.accelerator.has_checkpoint
    with pytest.raises(CheckpointError, match=r"no complete checkpoint"):
        run.accelerator.load_state()


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.unlink(), "'optimizer.bin' is absent"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "'optimizer.bin' has .* bytes, not"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
            "'optimizer.bin' has the checksum",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, harm, said):
    run = Setup(tmp_path, numbered=False)
    run.train(1)
    path = tmp_path / "c"
    run.accelerator.save_state(path)
    harm(path / "optimizer.bin")
    before = run.weights().clone()
    with pytest.raises(CheckpointError, match=said):
        run.accelerator.load_state(path)
    assert torch.equal(run.weights(), before)


def test_the_newest_complete_one_is_loaded_and_the_damaged_one_named(tmp_path, told):
    run = Setup(tmp_path)
    run.train(1)
    run.accelerator.save_state()
    before = run.weights().clone()
    run.train(1)
    path = run.accelerator.save_state()
    os.truncate(f"{path}/model.safetensors", 10)
    again = Setup(tmp_path)
    again.accelerator.load_state()
    assert torch.equal(again.weights(), before)
    assert "'model.safetensors' has 10 bytes" in told.text
    again.accelerator.save_state()  # as number 2: nothing is overwritten
    assert listing(tmp_path / "checkpoints") == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]


def test_rotation_counts_complete_checkpoints_only(tmp_path):
    run = Setup(tmp_path, limit=2)
    for _ in range(2):
        run.accelerator.save_state()
    os.truncate(tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors", 1)
    run.accelerator.save_state()
    assert (tmp_path / "checkpoints" / "checkpoint_0").exists()


@pytest.mark.parametrize("path", ["nowhere://run/here", Path("nowhere://bucket/run")])
def test_a_path_with_an_unknown_scheme_makes_no_local_folder(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    weights = str(path)
    for call in (
        lambda: accelerator.save_state(path),
        lambda: accelerator.load_state(path),
        lambda: accelerator.save_model(model, path),
        lambda: accelerator.save({}, weights),
        lambda: accelerator.save({"w": torch.zeros(1)}, weights, safe_serialization=True),
        lambda: merge_fsdp_weights(path, tmp_path),
    ):
        with pytest.raises(
            SettingsError, match=r"='nowhere://.*fsspec has no file system for the scheme 'nowhere'"
        ):
            call()
    assert listing(tmp_path) == []


def test_functions_that_need_a_local_folder_make_none_for_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: save_accelerator_state("memory://a", [], [], [], [], 0, 0),
        lambda: load_accelerator_state("memory://a", [], [], [], [], 0),
        lambda: save_custom_state(Counter(), "memory://a"),
        lambda: load_custom_state(Counter(), "memory://a"),
    ):
        with pytest.raises(SettingsError, match=r"='memory://a': .*needs a local folder"):
            call()
    assert listing(tmp_path) == []


@pytest.mark.parametrize("folder", [".", ".."])
def test_the_current_folder_and_its_parent_can_be_saved_to(tmp_path, monkeypatch, folder):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    run = Setup(numbered=False)
    for _ in range(2):
        run.accelerator.save_state(folder)
    run.accelerator.load_state(folder)
    assert "model.safetensors" in listing(folder)


def test_a_folder_that_exists_keeps_its_other_files(tmp_path):
    run = Setup(tmp_path, numbered=False)
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "notes.txt").write_text("kept")
    run.accelerator.register_for_checkpointing(Counter(1))
    run.train(1)
    run.accelerator.save_state(folder)
    run.train(1)
    after = run.weights().clone()
    run.accelerator.save_state(folder, safe_serialization=False)
    assert (folder / "notes.txt").read_text() == "kept"
    assert not (folder / "model.safetensors").exists()
    assert not [name for name in listing(folder) if name.startswith(".")]
    run.train(1)
    run.accelerator.load_state(folder)
    assert torch.equal(run.weights(), after)


def test_files_that_no_checkpoint_lists_stay_whatever_their_names(tmp_path):
    run = Setup(tmp_path, numbered=False)
    run.train(1)
    out, other = tmp_path / "out", torch.nn.Linear(4, 4).state_dict()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save({"model": other}, checkpoint_id=out / "pytorch_model_fsdp_0", no_dist=True)
    torch.save(other, out / "pytorch_model.bin")
    for name in ("trackers.json", "optimizer_1.bin", "latest", "pytorch_model/config.json"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
    mine = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    before = run.weights().clone()
    for _ in range(2):  # without an earlier manifest, and with one
        run.accelerator.save_state(out)
    run.train(1)
    run.accelerator.load_state(out)  # and shards that are not of the checkpoint are not loaded with it
    assert torch.equal(run.weights(), before)
    assert {path: path.read_bytes() for path in mine} == mine
    run.accelerator.save_state(out, safe_serialization=False)
    assert torch.load(out / "pytorch_model.bin").keys() == run.model.state_dict().keys()
    assert not (out / "model.safetensors").exists()


def test_a_folder_inside_with_the_name_of_a_file_of_checkpoints_stays(tmp_path):
    run = Setup(tmp_path, numbered=False)
    for folder in (tmp_path, tmp_path / "latest", tmp_path):
        run.accelerator.save_state(folder)
    run.accelerator.load_state(tmp_path / "latest")


def test_weights_that_were_saved_beside_a_checkpoint_are_not_loaded_with_it(tmp_path):
    run = Setup(tmp_path, numbered=False)
    before = run.weights().clone()
    run.accelerator.save_state(tmp_path / "here", safe_serialization=False)
    run.train(2)
    run.accelerator.save_model(run.model, tmp_path / "here")
    run.accelerator.load_state(tmp_path / "here")
    assert torch.equal(run.weights(), before)


def test_files_beside_a_checkpoint_may_vanish_and_its_folders_may_be_links(tmp_path, monkeypatch):
    def write_notes(models, weights, folder):
        (Path(folder) / "more").mkdir()
        (Path(folder) / "more" / "notes.txt").write_text("of a hook")

    run = Setup(tmp_path, numbered=False)
    run.accelerator.register_save_state_pre_hook(write_notes)
    run.accelerator.save_state(tmp_path / "here")
    (tmp_path / "here" / "more").rename(tmp_path / "elsewhere")
    (tmp_path / "here" / "more").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(Path, "rglob", None)  # files of others are not looked at
    run.accelerator.load_state(tmp_path / "here")


def test_hooks_see_models_weights_and_folder_and_their_files_belong_to_the_checkpoint(tmp_path):
    run = Setup(tmp_path, numbered=False)

    def on_save(models, weights, output_dir):
        assert models[0] is run.model
        weights.pop()
        Path(output_dir, "unet").mkdir()
        torch.save(models[0].state_dict(), f"{output_dir}/unet/own.bin")

    def on_load(models, input_dir):
        models.pop().load_state_dict(torch.load(f"{input_dir}/unet/own.bin"))

    saving = run.accelerator.register_save_state_pre_hook(on_save)
    run.accelerator.register_load_state_pre_hook(on_load)
    run.train(1)
    before = run.weights().clone()
    run.accelerator.save_state(tmp_path / "c")
    assert not (tmp_path / "c" / "model.safetensors").exists()
    assert "unet/own.bin" in json.loads((tmp_path / "c" / "accel_manifest.json").read_text())["files"]
    run.train(1)
    run.accelerator.load_state(tmp_path / "c")
    assert torch.equal(run.weights(), before)
    saving.remove()
    run.accelerator.save_state(tmp_path / "c")
    assert (tmp_path / "c" / "model.safetensors").exists()
    assert not (tmp_path / "c" / "unet" / "own.bin").exists()


def test_what_a_hook_writes_under_a_name_of_the_checkpoint_is_replaced(tmp_path):
    def on_save(models, weights, folder):
        os.link(base, Path(folder, "model.safetensors"))  # what the link leads to must stay
        Path(folder, "optimizer.bin").write_text("of a hook")

    base = tmp_path / "base"
    base.write_bytes(b"base weights")
    run = Setup(tmp_path, numbered=False)
    run.train(1)
    before = run.weights().clone()
    run.accelerator.register_save_state_pre_hook(on_save)
    run.accelerator.save_state(tmp_path / "c")
    run.train(1)
    run.accelerator.load_state(tmp_path / "c")
    assert torch.equal(run.weights(), before)
    assert base.read_bytes() == b"base weights"


def test_registered_objects_come_back(tmp_path):
    run, counter = Setup(tmp_path), Counter(5)
    run.accelerator.register_for_checkpointing(counter)
    run.accelerator.save_state()
    counter.value = 0
    run.accelerator.load_state()
    assert counter.value == 5
    with pytest.raises(
        ValueError, match=r"invalid:\n\t- Item at index 0, `int`\n\t- Item at index 2, `str`$"
    ):
        run.accelerator.register_for_checkpointing(3, Counter(), "x")


def test_fewer_or_more_objects_than_were_saved_are_named(tmp_path, told):
    run = Setup(tmp_path)
    run.accelerator.register_for_checkpointing(Counter())
    run.accelerator.save_state()
    fewer = Setup(tmp_path)
    fewer.accelerator.load_state()
    assert "custom_checkpoint_0.pkl is in the checkpoint" in told.text
    more = Setup(tmp_path)
    more.accelerator.register_for_checkpointing(Counter(), Counter())
    with pytest.raises(CheckpointError, match=r"has no 'custom_checkpoint_1.pkl'"):
        more.accelerator.load_state()


def test_fewer_or_more_shards_than_were_saved_are_named(tmp_path, told):
    def sharded(numbers):
        run = Setup(tmp_path, numbered=False)
        for _ in range(numbers - 1):
            model = nn.Linear(2, 2)
            run.accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        checkpoints = run.accelerator._parts.checkpoints
        checkpoints.strategy.states = ShardedStates(torch.device("cpu"), lambda: StateForm.SHARDED)
        return run

    one, two = sharded(1), sharded(2)
    one.accelerator.save_state(tmp_path / "one")
    two.accelerator.save_state(tmp_path / "two")
    one.accelerator.load_state(tmp_path / "two")
    assert "pytorch_model_fsdp_1 is in the checkpoint" in told.text
    assert "optimizer_1 is in the checkpoint" in told.text
    (tmp_path / "two" / "pytorch_model_fsdp_1").rename(tmp_path / "one" / "pytorch_model_fsdp_1")
    with pytest.raises(CheckpointError, match=r"has no 'model_1.safetensors'"):
        two.accelerator.load_state(tmp_path / "one")


class FilesOfItsOwn(ShardedStates):
    """The files of a strategy."""

    def save_native(self, model, directory, index, *, write=torch.save):
        write(model.state_dict(), directory / f"own_{index}.bin")

    def load_native(self, model, directory, index):
        model.load_state_dict(torch.load(directory / f"own_{index}.bin"))


def test_options_that_the_files_of_a_strategy_do_not_take_are_named(tmp_path, told):
    run = Setup(tmp_path, numbered=False)
    checkpoints = run.accelerator._parts.checkpoints
    checkpoints.strategy.states = FilesOfItsOwn(torch.device("cpu"), lambda: StateForm.NATIVE)
    run.accelerator.save_state(tmp_path / "c")
    run.accelerator.load_state(tmp_path / "c")
    assert "ignores" not in told.text
    run.accelerator.load_state(tmp_path / "c", strict=False)
    assert "load_state(strict=False): the strategy 'single' ignores this for files of its own" in told.text


def test_what_would_run_code_is_not_read(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    run = Setup(tmp_path, numbered=False)
    path = tmp_path / "c"
    run.accelerator.save_state(path)
    (path / "accel_manifest.json").unlink()
    torch.save({"value": Trap()}, path / "scheduler.bin")
    with pytest.raises(CheckpointError, match=r"scheduler.bin' contains objects.*weights_only"):
        run.accelerator.load_state(path)
    (path / "scheduler.bin").write_bytes(pickle.dumps(Trap(), protocol=2))
    with pytest.raises(CheckpointError, match=r"scheduler.bin'"):
        run.accelerator.load_state(path)
    assert not (tmp_path / "trapped").exists()


def test_more_than_strict_weights_can_be_loaded(tmp_path):
    run = Setup(tmp_path, numbered=False)
    run.accelerator.save_state(tmp_path / "c")
    run.model.register_parameter("new", nn.Parameter(torch.ones(1)))
    with pytest.raises(RuntimeError, match=r"Missing key"):
        run.accelerator.load_state(tmp_path / "c")
    run.accelerator.load_state(tmp_path / "c", strict=False, map_location="on_device")


def test_the_state_that_was_staged_is_saved_whatever_training_does(tmp_path, monkeypatch):
    gate = threading.Event()
    original = files.FileWriter.__init__

    def slow(self, path, **options):
        assert gate.wait(60)
        original(self, path, **options)

    run = Setup(tmp_path)
    run.train(2)
    before = run.weights().clone()
    monkeypatch.setattr(files.FileWriter, "__init__", slow)
    saving = run.accelerator.save_state(blocking=False)
    assert not saving.done
    run.train(2)
    assert not Path(saving).exists()
    gate.set()
    assert saving.wait() == str(tmp_path / "checkpoints" / "checkpoint_0")
    assert saving.done
    run.accelerator.load_state()
    assert torch.equal(run.weights(), before)


def save_and_wait(accelerator, blocking, folder=None):
    saved = accelerator.save_state(folder, blocking=blocking)
    if not blocking:
        saved.wait()


class FailingDisk:
    """`os`, as files.py sees it, with a disk that is full after some bytes."""

    def __init__(self, room):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_disk_that_is_full_in_the_middle_of_an_optimizer_is_said(tmp_path, monkeypatch, blocking):
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1024, 1024, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(1, 1024)).sum())
    optimizer.step()
    monkeypatch.setattr(files, "os", FailingDisk(10 << 20))  # 4 MiB of weights, 8 of moments
    with pytest.raises(CheckpointWriteError, match=r"write .optimizer.bin.: No space left on device"):
        save_and_wait(accelerator, blocking, tmp_path / "c")


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("room", [0, 700, 20_000])
def test_a_full_disk_is_said_and_the_older_checkpoint_stands(tmp_path, monkeypatch, blocking, room):
    run = Setup(tmp_path, limit=1)
    run.train(1)
    run.accelerator.save_state()
    before = run.weights().clone()
    run.train(1)
    monkeypatch.setattr(files, "os", FailingDisk(room))
    with pytest.raises(
        CheckpointWriteError, match=r"rank 0 could not write '.*': No space left.*Older ones are unchanged"
    ):
        save_and_wait(run.accelerator, blocking)
    monkeypatch.undo()
    assert listing(tmp_path / "checkpoints") == ["checkpoint_0"]
    run.accelerator.load_state()
    assert torch.equal(run.weights(), before)


def test_an_error_of_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    run = Setup(tmp_path)
    monkeypatch.setattr(files, "os", FailingDisk(0))
    run.accelerator.save_state(blocking=False)
    with pytest.raises(CheckpointWriteError, match=r"No space left"):
        run.accelerator.save_state()
    monkeypatch.undo()
    run.accelerator.save_state()
    assert run.accelerator.has_checkpoint


def test_end_training_waits_for_a_save_in_the_background_and_raises_its_error(tmp_path, monkeypatch):
    run = Setup(tmp_path)
    monkeypatch.setattr(files, "os", FailingDisk(0))
    run.accelerator.save_state(blocking=False)
    with pytest.raises(CheckpointWriteError, match=r"No space left"):
        run.accelerator.end_training()


def test_the_store_of_a_group_that_the_script_destroys_lasts_until_a_save_is_written():
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", 0, 1, True), rank=0, world_size=1)
    connection, gate = clone_store(dist.distributed_c10d._get_default_store()), threading.Event()

    def work():
        assert gate.wait(60)
        connection.set("written", "1")
        assert connection.get("written") == b"1"

    saving = Saving("folder", work)
    saving.start()
    dist.destroy_process_group()
    gc.collect()
    gate.set()
    assert saving.wait() == "folder"


@pytest.mark.parametrize("blocking", [True, False])
def test_a_state_that_cannot_be_saved_leaves_nothing_behind(tmp_path, blocking):
    run, bad = Setup(tmp_path), Counter(lambda: None)
    run.accelerator.register_for_checkpointing(bad)
    with pytest.raises(CheckpointWriteError, match=r"lambda"):
        save_and_wait(run.accelerator, blocking)
    assert listing(tmp_path / "checkpoints") == []


def test_the_files_of_a_folder_are_written_as_others_may_read_them(tmp_path):
    before = os.umask(0o022)
    try:
        path = Setup(tmp_path).accelerator.save_state()
    finally:
        os.umask(before)
    assert Path(path).stat().st_mode & 0o777 == 0o755
    assert {Path(path, name).stat().st_mode & 0o777 for name in listing(path)} == {0o644}


def test_save_model_cuts_large_models_and_writes_an_index(tmp_path):
    run = Setup(tmp_path)
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    run.accelerator.save_model(model, tmp_path / "m", max_shard_size=500)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 880
    assert set(index["weight_map"]) == set(model.state_dict())
    run.accelerator.save_model(model, tmp_path / "m", safe_serialization=False)
    assert "pytorch_model.bin" in listing(tmp_path / "m")


@pytest.mark.parametrize("model", [3, None, nn.Linear(2, 2).state_dict()])
def test_what_is_no_model_is_refused_before_a_folder_is_made(tmp_path, model):
    accelerator = Setup(tmp_path).accelerator
    kind = type(model).__name__
    with pytest.raises(TypeError, match=rf"save_model\(\) takes a model, .*got an object of type '{kind}'"):
        accelerator.save_model(model, tmp_path / "m")
    with pytest.raises(TypeError, match=r"get_state_dict\(\) takes a model"):
        accelerator.get_state_dict(model)
    assert not (tmp_path / "m").exists()


def test_get_state_dict_and_save(tmp_path):
    run = Setup(tmp_path)
    assert set(run.accelerator.get_state_dict(run.model)) == set(run.model.state_dict())
    run.accelerator.save({"a": torch.ones(1)}, tmp_path / "a.bin")
    assert torch.equal(torch.load(tmp_path / "a.bin")["a"], torch.ones(1))
    assert len(list(run.accelerator.skip_first_batches(run.loader, 3))) == 1


def interrupted(folder, *, mid_epoch=False, stateful=False):
    """Stop in the second epoch after two of four batches; give the rest, and a new run that has loaded it."""

    def build():
        options = DataLoaderConfiguration(resume_mid_epoch=mid_epoch, use_stateful_dataloader=stateful)
        accelerator = Accelerator(cpu=True, dataloader_config=options)
        loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, shuffle=True)
        return accelerator, accelerator.prepare(loader)

    torch.manual_seed(0)
    accelerator, loader = build()
    list(loader)
    batches = iter(loader)
    epoch = [next(batches).tolist() for _ in range(2)]
    accelerator.save_state(folder)
    epoch += [batch.tolist() for batch in batches]
    following = [batch.tolist() for batch in loader]
    torch.manual_seed(1)
    accelerator, loader = build()
    accelerator.load_state(folder)
    assert loader.iteration == 1
    return accelerator, loader, epoch, following


def test_the_interrupted_epoch_begins_again_in_its_order(tmp_path):
    _, loader, epoch, _ = interrupted(tmp_path)
    assert [batch.tolist() for batch in loader] == epoch
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(8))


def test_batches_that_are_skipped_after_loading_are_those_that_were_done(tmp_path):
    accelerator, loader, epoch, _ = interrupted(tmp_path)
    loader.set_epoch(1)
    skipped = accelerator.skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in skipped] == epoch[2:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("how", ["mid_epoch", "stateful"])
def test_loaders_go_on_with_the_next_batch_where_that_is_asked_for(tmp_path, how):
    if how == "stateful":
        pytest.importorskip("torchdata")
    _, loader, epoch, following = interrupted(tmp_path, **{how: True})
    assert (tmp_path / "dl_state_dict.bin").exists() == (how == "stateful")
    assert [batch.tolist() for batch in loader] == epoch[2:]
    assert [batch.tolist() for batch in loader] == following


def test_a_stream_begins_again_with_another_number_of_workers(tmp_path):
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            yield from range(info.id, 8, info.num_workers) if info else range(8)

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Numbers(), batch_size=2))
    next(iter(loader))
    batches = iter(loader)
    next(batches)
    accelerator.save_state(tmp_path)
    again = Accelerator(cpu=True)
    loader = again.prepare(torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2))
    again.load_state(tmp_path)
    assert sorted(number for batch in loader for number in batch.tolist()) == list(range(8))


def test_the_documented_functions_save_and_load_by_themselves(tmp_path):
    run = Setup(tmp_path)
    run.train(2)
    state = run.model.state_dict()
    optimizers, schedules, loaders = [run.optimizer], [run.schedule], [run.loader]
    folder = save_accelerator_state(tmp_path / "f", [state], optimizers, schedules, loaders, 0, 3)
    before = run.weights().clone()
    drawn = torch.rand(())
    run.train(1)
    state = load_accelerator_state(folder, [run.model], optimizers, schedules, loaders, 0)
    assert state == {"step": 3}
    assert torch.equal(run.weights(), before)
    assert torch.rand(()) == drawn
    save_custom_state(Counter(4), folder, 2)
    counter = Counter()
    load_custom_state(counter, folder, 2)
    assert counter.value == 4


def test_shards_of_several_types_are_merged_for_torch(tmp_path):
    weights = {"a": torch.ones(2, 2), "b": torch.arange(3), "c": torch.zeros(0)}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "shards", no_dist=True)
    merge_fsdp_weights(tmp_path / "shards", tmp_path / "merged", safe_serialization=False)
    merged = torch.load(tmp_path / "merged" / "pytorch_model.bin")
    assert list(merged) == list(weights)
    assert all(torch.equal(merged[name], value) for name, value in weights.items())
    assert [value.untyped_storage().nbytes() for value in merged.values()] == [16, 24, 0]


def test_a_merge_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "shards", no_dist=True)

    def fail(state, path):
        Path(path).write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        merge_fsdp_weights(tmp_path / "shards", tmp_path / "merged", safe_serialization=False)
    assert listing(tmp_path / "merged") == []


def test_a_merged_file_is_not_deleted_with_the_shards(tmp_path):
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save({"model": {"a": torch.ones(2)}}, checkpoint_id=tmp_path / "shards", no_dist=True)
    with pytest.raises(
        SettingsError, match="is inside of the folder that remove_checkpoint_dir=True deletes"
    ):
        merge_fsdp_weights(tmp_path / "shards", tmp_path / "shards" / "in", remove_checkpoint_dir=True)
    merge_fsdp_weights(tmp_path / "shards", tmp_path / "shards2", remove_checkpoint_dir=True)
    assert listing(tmp_path) == ["shards2"]


@pytest.mark.parametrize("table", ["optimizer", None])
@pytest.mark.parametrize("is_safe", [True, False])
def test_the_shards_of_an_optimizer_are_not_merged_into_a_model(tmp_path, table, is_safe):
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save({table: state} if table else state, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    before = listing(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer_0' holds the state of an optimizer"):
        merge_fsdp_weights(tmp_path / "optimizer_0", tmp_path / "merged", is_safe, remove_checkpoint_dir=True)
    assert listing(tmp_path) == before


def test_a_merge_of_shards_that_hold_more_than_a_model_takes_the_model_and_deletes_nothing(tmp_path):
    weights = {"a": torch.ones(2)}
    content = {"model": weights, "optimizer": {"state": {"a": torch.zeros(2)}, "param_groups": [{"lr": 1.0}]}}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is a single process
        dcp.save(content, checkpoint_id=tmp_path / "shards", no_dist=True)
    before = listing(tmp_path)
    with pytest.raises(SettingsError, match=r"remove_checkpoint_dir=True would also delete 'optimizer'"):
        merge_fsdp_weights(tmp_path / "shards", tmp_path / "merged", remove_checkpoint_dir=True)
    assert listing(tmp_path) == before
    merge_fsdp_weights(tmp_path / "shards", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == {"a"}
    assert torch.equal(merged["a"], weights["a"])


def test_numbers_of_numpy_in_a_state_are_saved_and_loaded(tmp_path):
    kinds = "?bhilBHILefdFD"
    values = {kind: np.dtype(kind).type(1) for kind in kinds}
    values |= {"text": np.str_("best"), "texts": np.array(["a", "bc"]), "array": np.arange(3)}
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step))
    counter = Counter()
    counter.state_dict = lambda: values
    restored = {}
    counter.load_state_dict = restored.update
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(counter)
    optimizer.step()
    schedule.step()
    accelerator.save_state(tmp_path / "s")
    optimizer.param_groups[0]["lr"] = 0.0
    accelerator.load_state(tmp_path / "s")
    assert optimizer.param_groups[0]["lr"] == 0.1 * np.cos(1)
    assert restored.keys() == values.keys()
    for name, value in values.items():
        assert type(restored[name]) is type(value)
        assert np.array_equal(restored[name], value)


def test_a_replica_group_whose_state_another_one_saves_has_nothing_to_wait_for(tmp_path):
    run = Setup(tmp_path)
    checkpoints = run.accelerator._parts.checkpoints
    checkpoints.strategy.replicas = SimpleNamespace(is_saver=False)
    saving = run.accelerator.save_state(blocking=False)
    assert saving.wait() == saving.path
    assert saving.done
    assert not Path(saving.path).exists()
