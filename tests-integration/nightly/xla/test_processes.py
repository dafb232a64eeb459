"""The programs of several ranks: on a TPU with a process for every chip, anywhere else with one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nightly.xla import programs

SHARDED = "sharded_by_the_compiler"
REPLICATED = [name for name in programs.PROGRAMS if name != SHARDED]
NOTEBOOK = """
from accel import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    return accelerator.process_index, accelerator.num_processes

found = notebook_launcher(train)
assert len(found) > 1, found
assert {rank: (rank, len(found)) for rank in found} == found, found
"""


def left_in(folder: Path, name: str) -> list[str]:
    return sorted(path.name for path in folder.glob(f"{name}-*"))


def run(*line: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def launch(name: str, folder: Path, *words: str) -> None:
    accel = str(Path(sys.executable).with_name("accel"))
    run(accel, "launch", "--tpu", "--main_training_function", name, *words, programs.__file__, str(folder))


@pytest.mark.parametrize("name", REPLICATED)
def test_a_program_of_several_ranks_runs_with_one(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["programs.py", str(tmp_path)])
    programs.PROGRAMS[name]()
    assert left_in(tmp_path, name) == [f"{name}-0-of-1"]


@pytest.mark.tpu
@pytest.mark.parametrize("name", REPLICATED)
def test_a_program_runs_in_a_process_for_every_chip(name, tmp_path):
    launch(name, tmp_path)
    left = left_in(tmp_path, name)
    assert len(left) > 1, "this TPU has one chip"
    assert left == sorted(f"{name}-{rank}-of-{len(left)}" for rank in range(len(left)))


@pytest.mark.tpu
def test_one_process_shards_over_all_chips(tmp_path):
    launch(SHARDED, tmp_path, "--use_fsdp", "--fsdp_xla", "true", "--fsdp_xla_v2", "true")
    assert left_in(tmp_path, SHARDED) == [f"{SHARDED}-0-of-1"]


@pytest.mark.tpu
def test_a_notebook_starts_a_process_for_every_chip(tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK)
    run(sys.executable, str(program))
