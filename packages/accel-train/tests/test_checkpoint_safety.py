"""Damage, other processes at the same folder, and states that do not fit."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from accel_plugins.kwargs import ProjectConfiguration
from accel_state import platforms
from accel_state.errors import CheckpointError
from accel_train import Accelerator
from accel_train.checkpoint import layout, load
from accel_train.checkpoint.single_files import save_custom_state


class Value:
    def __init__(self, value=0.0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Run:
    """A model whose weights all have one value, an optimizer with momentum, and an object with that value."""

    def __init__(self, project=None, size=4):
        config = ProjectConfiguration(project_dir=project, automatic_checkpoint_naming=project is not None)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        model = nn.Linear(size, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.object = Value()
        self.accelerator.register_for_checkpointing(self.object)
        self.set(0.0)

    def set(self, value):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)
                self.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
        self.object.value = value

    def values(self):
        moments = [self.optimizer.state[p]["momentum_buffer"] for p in self.model.parameters()]
        tensors = [*self.model.parameters(), *moments]
        return {value for tensor in tensors for value in tensor.detach().unique().tolist()} | {
            self.object.value
        }


@pytest.fixture(autouse=True)
def told(caplog):
    caplog.set_level(logging.WARNING)
    return caplog


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def swap(path):
    shutil.copy(path.parent.parent / "checkpoint_0" / path.name, path)


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_dangling_link(path):
    path.unlink()
    path.symlink_to("nowhere")


def as_deep_json(path):
    path.write_text("[" * 200_000)


MANIFEST = "accel_manifest.json"


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *((name, harm) for name in ("model.safetensors", "optimizer.bin") for harm in (flip, zero, swap)),
        ("custom_checkpoint_0.pkl", flip),
        ("model.safetensors", as_folder),
        ("model.safetensors", as_dangling_link),
        (MANIFEST, as_folder),
        (MANIFEST, as_dangling_link),
        (MANIFEST, as_deep_json),
        (MANIFEST, swap),
        (MANIFEST, zero),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, told, name, harm):
    run = Run(tmp_path)
    for value in (1.0, 2.0, 3.0):
        run.set(value)
        run.accelerator.save_state()
    harm(tmp_path / "checkpoints" / "checkpoint_2" / name)
    run.set(9.0)
    run.accelerator.load_state()
    assert run.values() == {2.0}
    assert "Skipped: " in told.text
    assert f"checkpoint_2{'/' if name == MANIFEST and harm is not swap else ''}" in told.text
    assert run.accelerator.project_configuration.iteration == 3


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin"])
def test_damage_of_a_long_file_is_found_before_anything_changes(tmp_path, name):
    run = Run(size=600)
    run.accelerator.save_state(tmp_path / "c")
    assert (tmp_path / "c" / name).stat().st_size > 1 << 20
    flip(tmp_path / "c" / name)
    run.set(9.0)
    with pytest.raises(CheckpointError, match=rf"damaged: '{name}' has the checksum"):
        run.accelerator.load_state(tmp_path / "c")
    assert run.values() == {9.0}


def test_checksums_are_not_compared_where_that_is_not_wanted(tmp_path):
    run = Run(size=600)
    run.set(1.0)
    run.accelerator.save_state(tmp_path / "c")
    path = tmp_path / "c" / "model.safetensors"
    flip(path)
    with pytest.raises(CheckpointError, match="damaged"):
        run.accelerator.load_state(tmp_path / "c")
    run.accelerator.load_state(tmp_path / "c", verify=False)
    assert len(run.values() - {1.0}) == 1
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"damaged: 'model.safetensors' has .* bytes, not"):
        run.accelerator.load_state(tmp_path / "c", verify=False)


def test_without_any_whole_checkpoint_the_damage_of_the_newest_is_said(tmp_path):
    run = Run(tmp_path)
    for _ in range(2):
        flip(Path(run.accelerator.save_state()) / "optimizer.bin")
    run.set(9.0)
    with pytest.raises(
        CheckpointError, match=r"No checkpoint is complete.*checkpoint_1.*'optimizer.bin' has the"
    ):
        run.accelerator.load_state()
    assert run.values() == {9.0}


def test_a_whole_checkpoint_of_other_objects_is_not_passed_over(tmp_path):
    run = Run(tmp_path)
    run.accelerator.save_state()
    run.accelerator.register_for_checkpointing(Value())
    run.set(9.0)
    with pytest.raises(CheckpointError, match=r"checkpoint_0' has no 'custom_checkpoint_1.pkl'"):
        run.accelerator.load_state()
    assert run.values() == {9.0}


@pytest.mark.parametrize("absent", ["optimizer.bin", "custom_checkpoint_0.pkl", "model.safetensors"])
def test_nothing_changes_if_a_folder_without_a_manifest_lacks_a_file(tmp_path, absent):
    run = Run()
    run.accelerator.save_state(tmp_path / "c")
    (tmp_path / "c" / MANIFEST).unlink()
    (tmp_path / "c" / absent).unlink()
    run.set(9.0)
    with pytest.raises(CheckpointError, match=absent):
        run.accelerator.load_state(tmp_path / "c")
    assert run.values() == {9.0}


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("name", ["model", "optimizer.bin", "custom_checkpoint_0.pkl"])
def test_nothing_changes_if_a_file_of_another_library_is_cut_off(tmp_path, name, safe, hooks):
    run = Run(size=600)
    run.accelerator.prepare(nn.Linear(4, 4))
    run.accelerator.save_state(tmp_path / "c", safe_serialization=safe)
    (tmp_path / "c" / MANIFEST).unlink()
    last = ("model_1.safetensors" if safe else "pytorch_model_1.bin") if name == "model" else name
    path = tmp_path / "c" / last
    path.write_bytes(path.read_bytes()[:-100])
    run.set(9.0)
    if hooks:
        run.accelerator.register_load_state_pre_hook(lambda models, folder: run.set(7.0))
    with pytest.raises(CheckpointError, match=last):
        run.accelerator.load_state(tmp_path / "c")
    assert run.values() == {9.0}


def other_process(script, *arguments):
    """A process that has printed a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline()
    return process


@pytest.fixture
def windows(monkeypatch):
    """Plant how Windows treats files: text mode, no deletion and no flush of some open ones."""
    fcntl = pytest.importorskip("fcntl")
    binary = 0o100000  # Linux ignores it
    opened, fsync, unlink, texts = os.open, os.fsync, os.unlink, []

    def open_(path, flags, *arguments, **options):
        if not flags & binary and flags & (os.O_WRONLY | os.O_RDWR):
            texts.append(path)
        return opened(path, flags, *arguments, **options)

    def fsync_(descriptor):
        is_folder = os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: PTH112
        if not is_folder and not fcntl.fcntl(descriptor, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR):
            raise OSError(9, "Bad file descriptor")
        fsync(descriptor)

    def unlink_(path, *arguments, **options):
        target = os.path.realpath(path)
        if target in {os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()}:
            raise PermissionError(13, "The file is used by another process", path)
        unlink(path, *arguments, **options)

    monkeypatch.setattr(os, "O_BINARY", binary, raising=False)
    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync_)
    monkeypatch.setattr(os, "unlink", unlink_)
    monkeypatch.setattr(platforms, "SYSTEM", "win32")
    monkeypatch.delattr(os, "preadv")
    return texts


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and bits of Linux")
def test_windows_files_are_binary_flushed_where_they_can_be_and_closed_before_they_go(tmp_path, windows):
    def write_notes(models, weights, folder):
        Path(folder, "notes.txt").write_bytes(b"of a hook")

    run = Run()
    run.accelerator.register_save_state_pre_hook(write_notes)
    for value in (1.0, 2.0):
        run.set(value)
        run.accelerator.save_state(tmp_path / "c")
    save_custom_state(run.object, tmp_path)
    run.set(9.0)
    run.accelerator.load_state(tmp_path / "c")
    assert run.values() == {2.0}
    assert windows == []


def test_a_save_that_is_interrupted_lets_the_next_one_go_on(tmp_path):
    run = Run()
    interrupt = [KeyboardInterrupt]

    def hook(*_):
        if interrupt:
            raise interrupt.pop()

    run.accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        run.accelerator.save_state(tmp_path / "c")
    assert not [*tmp_path.iterdir()]
    run.accelerator.save_state(tmp_path / "c")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


SAVE = """
    import sys
    import torch
    sys.path.insert(0, sys.argv[2])
    from test_checkpoint_safety import Run
    run, value = Run(), 1.0
    print("ready", flush=True)
    while True:
        value += 1
        run.set(value)
        run.accelerator.save_state(sys.argv[1], flush=False)
        print(value, flush=True)
"""


@pytest.mark.parametrize("loads", [30, pytest.param(300, marks=pytest.mark.thorough)])
def test_loads_while_another_process_saves_into_the_folder_are_of_one_state(tmp_path, loads):
    path, run = tmp_path / "c", Run()
    run.accelerator.save_state(path)
    process = other_process(SAVE, path, Path(__file__).parent)
    saved = []
    reader = threading.Thread(target=lambda: saved.extend(process.stdout))
    reader.start()
    states, refusals = [], []
    try:
        while len(states) + len(refusals) < loads or not saved:
            assert process.poll() is None, "a reader has made a save fail"
            try:
                run.accelerator.load_state(path)
            except CheckpointError as error:
                refusals.append(str(error))
            else:
                (value,) = run.values()
                states.append(value)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdin.close()
        process.stdout.close()
    run.accelerator.load_state(path)  # whatever the process was doing when it was killed
    (value,) = run.values()
    states.append(value)
    assert states == sorted(states)
    assert float(saved[-1]) <= value
    assert [text for text in refusals if "was replaced by another process while it was" not in text] == []


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_refused(tmp_path, monkeypatch):
    path, run = tmp_path / "c", Run()
    run.accelerator.save_state(path)
    run.set(2.0)
    run.accelerator.save_state(tmp_path / "next")
    read_file = load.CheckpointReader.read

    def replace_first(source, name):
        if name == "optimizer.bin" and (tmp_path / "next" / name).exists():
            for entry in (tmp_path / "next").iterdir():
                os.replace(entry, path / entry.name)  # noqa: PTH105
        return read_file(source, name)

    monkeypatch.setattr(load.CheckpointReader, "read", replace_first)
    run.set(9.0)
    with pytest.raises(CheckpointError, match="was replaced by another process while it was loaded"):
        run.accelerator.load_state(path)
    assert run.values() == {9.0}
    run.accelerator.load_state(path)
    assert run.values() == {2.0}


@pytest.mark.parametrize("follows", ["load", "save"])
def test_the_replacement_that_a_dead_process_has_begun_is_completed_by_what_follows(tmp_path, follows):
    path, run = tmp_path / "c", Run()
    run.set(1.0)
    run.accelerator.save_state(path)
    run.set(2.0)
    run.accelerator.save_state(tmp_path / "next", safe_serialization=False)
    os.rename(tmp_path / "next", path / f"{layout.COMMIT_NAME}-1")  # noqa: PTH104 - where the writer died
    (path / ".accel-saving").mkdir()  # of one that died before
    if follows == "save":
        run.set(3.0)
        run.accelerator.save_state(path)
    run.set(9.0)
    run.accelerator.load_state(path)
    assert run.values() == {2.0 if follows == "load" else 3.0}
    assert not list(path.glob(f"{layout.COMMIT_NAME}*"))
    kept = "pytorch_model.bin" if follows == "load" else "model.safetensors"
    assert [name for name in ("pytorch_model.bin", "model.safetensors") if (path / name).exists()] == [kept]


def test_a_folder_that_is_replaced_while_hooks_read_from_it_is_an_error(tmp_path):
    path, run, other = tmp_path / "c", Run(), Run()
    run.accelerator.save_state(path)
    other.set(1.0)

    def hook(models, folder):
        assert folder == str(path)
        other.accelerator.save_state(folder)

    run.accelerator.register_load_state_pre_hook(hook)
    with pytest.raises(CheckpointError, match=r"'.*c' was replaced by another process while it"):
        run.accelerator.load_state(path)
