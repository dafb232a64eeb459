"""Checkpoints on object stores, with fsspec's store in memory."""

from __future__ import annotations

import io
import json
import sys
import threading
import warnings
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsspec.registry import known_implementations
from safetensors.torch import load, load_file
from torch import nn

from accel_plugins.kwargs import DataLoaderConfiguration, ProjectConfiguration
from accel_state.errors import CheckpointError, CheckpointWriteError, MissingDependencyError, SettingsError
from accel_state.remote import RemotePath
from accel_train import Accelerator
from accel_train.checkpoint.folder import recover
from accel_train.checkpoint.single_files import merge_fsdp_weights


@pytest.fixture(autouse=True)
def store():
    """The files of fsspec's store in memory, by path."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files.store
    files.store.clear()


class Setup:
    """A small run: momentum, a schedule, shuffled data."""

    def __init__(self, folder=None, *, limit=None, seed=0, **project):
        config = ProjectConfiguration(
            project_dir=folder, automatic_checkpoint_naming=folder is not None, total_limit=limit, **project
        )
        self.accelerator = Accelerator(
            cpu=True, project_config=config, dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)
        )
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )

    def train(self, batches=2):
        for batch, _ in zip(self.loader, range(batches), strict=False):
            self.accelerator.backward(self.model(batch).square().mean())
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def tensors(self):
        moments = [value["exp_avg"] for value in self.optimizer.optimizer.state.values()]
        return [tensor.detach().clone() for tensor in [*self.model.parameters(), *moments]]

    def expect(self, tensors):
        now = self.tensors()
        assert len(now) == len(tensors)
        assert all(map(torch.equal, now, tensors))


def upload(folder):
    """Copy the files of a folder to memory://bucket/run."""
    for path in folder.rglob("*"):
        if path.is_file():
            name = f"/bucket/run/{path.relative_to(folder).as_posix()}"
            fsspec.filesystem("memory").pipe_file(name, path.read_bytes())


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("safe", [True, False])
def test_a_state_on_a_store_is_loaded_bit_for_bit(store, tmp_path, monkeypatch, blocking, safe):
    monkeypatch.chdir(tmp_path)
    run = Setup()
    run.train()
    saving = run.accelerator.save_state("memory://bucket/run", safe, blocking=blocking)
    if not blocking:
        assert saving.wait() == "memory://bucket/run"
    expected, draw = run.tensors(), torch.rand(3)
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(expected)
    assert torch.equal(torch.rand(3), draw)
    assert not any(tmp_path.iterdir())
    manifest = json.loads(store["/bucket/run/accel_manifest.json"].getvalue())
    assert {f"/bucket/run/{name}" for name in manifest["files"]} | {"/bucket/run/accel_manifest.json"} == set(
        store
    )


def test_a_file_url_is_a_folder(tmp_path):
    run = Setup(f"file://{tmp_path}")
    run.train()
    assert run.accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_0")
    expected = run.tensors()
    other = Setup(f"file://{tmp_path}", seed=1)
    other.accelerator.load_state()
    other.expect(expected)
    other.accelerator.load_state(f"file://{tmp_path}/checkpoints/checkpoint_0")


def test_numbered_checkpoints_are_pruned_and_the_newest_is_loaded(store):
    run = Setup("memory://bucket/run", limit=2)
    assert run.accelerator.project_configuration.logging_dir is None
    assert not run.accelerator.has_checkpoint
    for number in range(4):
        run.train()
        assert run.accelerator.save_state() == f"memory://bucket/run/checkpoints/checkpoint_{number}"
    expected = run.tensors()
    names = {name.split("/")[4] for name in store}
    assert names == {"checkpoint_2", "checkpoint_3"}
    other = Setup("memory://bucket/run", seed=1)
    assert other.accelerator.has_checkpoint
    other.accelerator.load_state()
    other.expect(expected)
    assert other.accelerator.save_iteration == 4
    again = Setup("memory://bucket/run", iteration=2)
    with pytest.raises(SettingsError, match=r"checkpoint_3' already exists.*iteration=4"):
        again.accelerator.save_state()


def failing(monkeypatch, method, at, error=None, times=10**9):
    """Let a method of paths fail for files of a name; return the names that it was called with."""
    # Large files are uploaded from the disk.
    called = failing(monkeypatch, "upload", at, error, times) if method == "write_bytes" else []
    real = getattr(RemotePath, method)

    def call(self, *arguments, **options):
        nonlocal times
        called.append(self.name)
        if at is not None and at in str(self) and times > 0:
            times -= 1
            raise error or OSError(5, "no answer", str(self))
        return real(self, *arguments, **options)

    monkeypatch.setattr(RemotePath, method, call)
    return called


@pytest.mark.parametrize(
    "at", ["model.safetensors", "optimizer.bin", "random_states_0.pkl", "accel_manifest.json"]
)
def test_an_interrupted_upload_is_never_loaded_and_is_replaced(store, monkeypatch, at):
    run = Setup("memory://bucket/run")
    run.train()
    run.accelerator.save_state()
    expected = run.tensors()
    run.train()
    with monkeypatch.context() as patch:
        failing(patch, "write_bytes", at)
        with pytest.raises(CheckpointWriteError, match=r"no answer.*Older ones are unchanged"):
            run.accelerator.save_state()
    assert any(name.startswith("/bucket/run/checkpoints/checkpoint_1/") for name in store)
    with pytest.raises(CheckpointError, match="its upload was interrupted"):
        run.accelerator.load_state("memory://bucket/run/checkpoints/checkpoint_1")
    other = Setup("memory://bucket/run", seed=1)
    other.accelerator.load_state()
    other.expect(expected)
    assert other.accelerator.save_iteration == 1
    run.accelerator.project_configuration.iteration = 1
    assert run.accelerator.save_state().endswith("checkpoint_1")
    assert not any(".accel-upload" in name for name in store)
    expected = run.tensors()
    other = Setup("memory://bucket/run", seed=1)
    other.accelerator.load_state()
    other.expect(expected)


def test_the_next_save_to_the_folder_of_an_interrupted_upload_is_complete(store, monkeypatch):
    run = Setup()
    with monkeypatch.context() as patch:
        failing(patch, "write_bytes", "accel_manifest.json")
        with pytest.raises(CheckpointWriteError):
            run.accelerator.save_state("memory://bucket/run")
    run.train()
    expected = run.tensors()
    run.accelerator.save_state("memory://bucket/run")
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(expected)


def test_interrupted_uploads_of_other_numbers_are_deleted_by_the_next_save(store, monkeypatch):
    run = Setup("memory://bucket/run")
    with monkeypatch.context() as patch:
        failing(patch, "write_bytes", "accel_manifest.json")
        with pytest.raises(CheckpointWriteError):
            run.accelerator.save_state()
    assert run.accelerator.save_iteration == 1
    run.accelerator.save_state()
    assert {name.split("/")[4] for name in store} == {"checkpoint_1"}


@pytest.mark.parametrize(("method", "at", "is_saved"), [
    ("write_bytes", "nothing fails", True),
    ("write_bytes", "model.safetensors", False),
    ("write_bytes", "accel_manifest.json", False),
    ("copy_to", "model.safetensors", True),
    ("copy_to", "scheduler.bin", True),
    ("write_bytes", "run/accel_manifest.json", True),
    ("unlink", "accel_manifest.json", True),
    ("remove_tree", ".accel-commit", True),
])  # fmt: skip
def test_a_checkpoint_is_replaced_at_once_whatever_fails(store, monkeypatch, method, at, is_saved):
    run = Setup()
    run.accelerator.save_state("memory://bucket/run", safe_serialization=False)
    fsspec.filesystem("memory").pipe_file("/bucket/run/tokenizer.json", b"{}")
    expected = run.tensors()
    run.train()
    with monkeypatch.context() as patch:
        failing(patch, method, at)
        if is_saved:
            run.accelerator.save_state("memory://bucket/run")
            expected = run.tensors()
        else:
            with pytest.raises(CheckpointWriteError, match="Older ones are unchanged"):
                run.accelerator.save_state("memory://bucket/run")
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(expected)
    other.accelerator.save_state("memory://bucket/run")
    assert "/bucket/run/pytorch_model.bin" not in store
    assert not [name for name in store if "/.accel" in name]
    assert "/bucket/run/tokenizer.json" in store


def test_a_slow_load_that_completes_a_replacement_leaves_the_next_one_alone(store, monkeypatch):
    run, url = Setup(), "memory://bucket/run"
    run.accelerator.save_state(url)
    with monkeypatch.context() as patch:
        failing(patch, "copy_to", "model.safetensors")
        run.accelerator.save_state(url)  # it is complete, and replaces the old one later
    run.train()
    remove_tree, write_bytes = RemotePath.remove_tree, RemotePath.write_bytes
    is_copied, is_uploaded = threading.Event(), threading.Event()

    def remove_late(path):
        if threading.current_thread() is reader:
            is_copied.set()
            is_uploaded.wait()
        remove_tree(path)

    def write_late(path, content):
        if ".accel-commit" in str(path) and path.name == "accel_manifest.json":
            is_uploaded.set()
            reader.join()
        write_bytes(path, content)

    monkeypatch.setattr(RemotePath, "remove_tree", remove_late)
    monkeypatch.setattr(RemotePath, "write_bytes", write_late)
    reader = threading.Thread(target=recover, args=[RemotePath(url)])
    reader.start()
    is_copied.wait()
    run.accelerator.save_state(url)
    other = Setup(seed=1)
    other.accelerator.load_state(url)
    other.expect(run.tensors())
    assert not [name for name in store if "/.accel" in name]


def test_old_files_are_deleted_by_the_next_save_if_the_old_manifest_cannot_be_read_for_a_moment(
    store, monkeypatch
):
    run = Setup()
    run.accelerator.save_state("memory://bucket/run", safe_serialization=False)
    run.train()
    with monkeypatch.context() as patch:
        failing(patch, "read_bytes", "run/accel_manifest.json")
        run.accelerator.save_state("memory://bucket/run")  # it is complete, and replaces the old one later
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(run.tensors())
    assert "/bucket/run/pytorch_model.bin" not in store
    assert not [name for name in store if "/.accel" in name]


def test_files_that_no_checkpoint_lists_stay_whatever_their_names(store):
    names = ("pytorch_model.bin", "optimizer_1.bin", "trackers.json", "pytorch_model/config.json")
    for name in names:
        fsspec.filesystem("memory").pipe_file(f"/bucket/run/{name}", b"mine")
    run = Setup()
    for _ in range(2):  # without an earlier manifest, and with one
        run.train()
        run.accelerator.save_state("memory://bucket/run")
        assert [store[f"/bucket/run/{name}"].getvalue() for name in names] == [b"mine"] * len(names)
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(run.tensors())


def test_what_an_interrupted_upload_has_left_is_not_loaded_and_files_of_others_stay(store, monkeypatch):
    run = Setup()
    with monkeypatch.context() as patch:
        failing(patch, "write_bytes", "accel_manifest.json")
        with pytest.raises(CheckpointWriteError):
            run.accelerator.save_state("memory://bucket/run", safe_serialization=False)
    fsspec.filesystem("memory").pipe_file("/bucket/run/optimizer_1.bin", b"mine")
    run.train()
    run.accelerator.save_state("memory://bucket/run")
    assert store["/bucket/run/optimizer_1.bin"].getvalue() == b"mine"
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(run.tensors())


def test_a_deletion_that_is_interrupted_leaves_no_checkpoint(store, monkeypatch):
    run = Setup("memory://bucket/run", limit=1)
    run.accelerator.save_state()
    run.train()
    with monkeypatch.context() as patch:
        failing(patch, "unlink", "model.safetensors")
        run.accelerator.save_state()
    assert "/bucket/run/checkpoints/checkpoint_0/model.safetensors" in store
    other = Setup("memory://bucket/run")
    other.accelerator.load_state()
    other.expect(run.tensors())
    with pytest.raises(CheckpointError, match="interrupted"):
        other.accelerator.load_state("memory://bucket/run/checkpoints/checkpoint_0")
    run.accelerator.save_state()
    assert {name.split("/")[4] for name in store} == {"checkpoint_2"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_file_is_found_and_the_checkpoint_before_is_loaded(store, name, damage):
    run = Setup("memory://bucket/run")
    run.train()
    run.accelerator.save_state()
    expected = run.tensors()
    run.train()
    run.accelerator.save_state()
    path = f"/bucket/run/checkpoints/checkpoint_1/{name}"
    content = bytearray(store[path].getvalue())
    content[len(content) // 2] ^= 1
    files = fsspec.filesystem("memory")
    files.rm_file(path) if damage == "delete" else files.pipe_file(
        path, bytes(content[: -1 if damage == "cut" else None])
    )
    other = Setup("memory://bucket/run", seed=1)
    other.accelerator.load_state()
    other.expect(expected)
    with pytest.raises(CheckpointError, match="checkpoint_1"):
        other.accelerator.load_state("memory://bucket/run/checkpoints/checkpoint_1")


def test_hooks_write_and_read_folders_of_this_machine(store):
    run = Setup()
    seen = []

    def write(models, weights, folder):
        (Path(folder) / "unet").mkdir()
        (Path(folder) / "unet" / "config.json").write_text("7")
        (Path(folder) / "model.safetensors").write_text("replaced")

    def read(models, folder):
        seen.append((Path(folder) / "unet" / "config.json").read_text())

    run.accelerator.register_save_state_pre_hook(write)
    run.accelerator.register_load_state_pre_hook(read)
    run.accelerator.save_state("memory://bucket/run")
    assert store["/bucket/run/unet/config.json"].getvalue() == b"7"
    run.accelerator.load_state("memory://bucket/run")
    assert seen == ["7"]
    assert load(store["/bucket/run/model.safetensors"].getvalue()).keys() == run.model.state_dict().keys()


def test_a_checkpoint_without_a_manifest_is_loaded_from_a_store(store, tmp_path):
    run = Setup()
    run.train()
    run.accelerator.save_state(tmp_path / "here")
    (tmp_path / "here" / "accel_manifest.json").unlink()
    upload(tmp_path / "here")
    other = Setup(seed=1)
    other.accelerator.load_state("memory://bucket/run")
    other.expect(run.tensors())


def test_what_a_store_cannot_hold_is_one_sentence(store, monkeypatch):
    run = Setup(save_on_each_node=True)
    with pytest.raises(SettingsError, match=r"save_on_each_node=True.*all hosts share"):
        run.accelerator.save_state("memory://bucket/run")
    with pytest.raises(
        SettingsError, match=r"save_state.*'nowhere://run'.*no file system for the scheme 'nowhere'"
    ):
        run.accelerator.save_state("nowhere://run")
    monkeypatch.setitem(known_implementations, "absent", {"class": "absent.Files", "err": "Install absent"})
    with pytest.raises(MissingDependencyError, match="project_dir='absent://run': Install absent"):
        ProjectConfiguration(project_dir="absent://run")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(MissingDependencyError, match=r"needs fsspec.*accel-train\[remote\]"):
        run.accelerator.load_state("memory://bucket/run")
    monkeypatch.undo()
    run = Setup()
    with pytest.raises(CheckpointError, match="there is no folder 'memory://bucket/nothing'"):
        run.accelerator.load_state("memory://bucket/nothing")
    run.accelerator.save_state("memory://bucket/run")
    run.accelerator.load_state("memory://bucket/run", load_kwargs={"mmap": True})


def test_models_are_saved_in_files_of_bounded_size(store):
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    accelerator.save_model(model, "memory://bucket/model", max_shard_size=300)
    names = sorted(name.rpartition("/")[2] for name in store)
    assert names == [
        *(f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)),
        "model.safetensors.index.json",
    ]
    saved = {}
    for name in names[:4]:
        saved |= load(store[f"/bucket/model/{name}"].getvalue())
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    accelerator.save_model(model, "memory://bucket/model")
    assert [name.rpartition("/")[2] for name in store] == ["model.safetensors"]
    accelerator.save_model(model, "memory://bucket/model", safe_serialization=False)
    assert torch.load(store["/bucket/model/pytorch_model.bin"], weights_only=True).keys() == saved.keys()
    accelerator.save({"w": torch.ones(2)}, "memory://bucket/one.safetensors", safe_serialization=True)
    assert load(store["/bucket/one.safetensors"].getvalue())["w"].tolist() == [1, 1]


def test_shards_on_a_store_are_merged_there(store, tmp_path):
    weights = {"layer.weight": torch.arange(12.0).reshape(3, 4), "layer.bias": torch.ones(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It warns that there is one process.
        dcp.save({"model": weights}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    upload(tmp_path)
    merge_fsdp_weights("memory://bucket/run", "memory://bucket/out", remove_checkpoint_dir=True)
    merged = load(store["/bucket/out/model.safetensors"].getvalue())
    assert all(torch.equal(merged[name], value) for name, value in weights.items())
    assert [*store] == ["/bucket/out/model.safetensors"]
    upload(tmp_path)
    merge_fsdp_weights("memory://bucket/run", tmp_path / "out")
    assert all(
        torch.equal(load_file(tmp_path / "out/model.safetensors")[n], value) for n, value in weights.items()
    )
    merge_fsdp_weights("memory://bucket/run", "memory://bucket/bin", safe_serialization=False)
    assert (
        torch.load(io.BytesIO(store["/bucket/bin/pytorch_model.bin"].getvalue()), weights_only=True).keys()
        == weights.keys()
    )
