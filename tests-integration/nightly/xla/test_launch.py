"""Launched on XLA devices: by the command, and from a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from accel import Accelerator

def train():
    accelerator = Accelerator()
    print(accelerator.device, accelerator.num_processes, accelerator._parts.strategy.name, *sys.argv[1:])
    if "fail" in sys.argv:
        raise ValueError("a problem of the script")
"""

NOTEBOOK = """
from accel import Accelerator, notebook_launcher
from accel_state.errors import SettingsError

def train(word):
    accelerator = Accelerator()
    return word, str(accelerator.device), accelerator.num_processes, accelerator.mixed_precision

print(notebook_launcher(train, ("a",), mixed_precision="bf16"))
print(notebook_launcher(lambda: [1, 2][0], num_processes=1))
def refused(number):
    try:
        notebook_launcher(train, ("c",), number)
    except SettingsError as error:
        return error

print(refused(8))
train("here")
print(refused(None))
"""


FORMATS = """
import torch
from accel import Accelerator
from torch import nn

def train():
    accelerator = Accelerator()
    third = 1 / 3
    for dtype in (torch.float32, torch.float64):
        moved = torch.tensor(third, dtype=dtype).to(accelerator.device)
        assert moved.dtype == dtype
        print(dtype, moved.cpu().item())
    model = accelerator.prepare(nn.Linear(4, 4))
    output = model(torch.ones(2, 4, device=accelerator.device))
    print(accelerator.mixed_precision, output.dtype, model.weight.dtype)
"""
FLOAT, BFLOAT = 0.3333333432674408, 0.333984375


def run(*line: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "CPU_NUM_DEVICES": str(devices)}
    return subprocess.run(line, env=environ, capture_output=True, text=True, check=False)


def launch(*words: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
    accel = str(Path(sys.executable).with_name("accel"))
    line = (accel, "launch", "--tpu", "--main_training_function", "train", *words)
    return run(*line, devices=devices)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_command_starts_a_process_for_every_device(script):
    done = launch(script, "--lr", "1")
    assert (done.returncode, done.stdout) == (0, "xla:0 1 xla --lr 1\n"), done.stderr


def test_the_command_starts_one_process_where_the_compiler_shards(script):
    done = launch("--use_fsdp", "--fsdp_xla", "true", "--fsdp_xla_v2", "true", script, "fail", devices=4)
    assert done.stdout == "xla:0 1 xla_fsdp fail\n", done.stderr
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: a problem of the script")


@pytest.mark.parametrize(
    ("words", "name", "stored"),
    [
        pytest.param(
            ("--mixed_precision", "bf16"), "bf16", [BFLOAT, BFLOAT], marks=pytest.mark.thorough, id="bf16"
        ),
        pytest.param(
            ("--mixed_precision", "bf16", "--downcast_bf16"), "bf16", [BFLOAT, FLOAT], id="downcast"
        ),
        pytest.param(
            ("--downcast_bf16",), "no", [FLOAT, 1 / 3], marks=pytest.mark.thorough, id="without bf16"
        ),
    ],
)
def test_bf16_stores_float_as_bfloat16_and_double_too_unless_it_is_downcast(words, name, stored, tmp_path):
    program = tmp_path / "formats.py"
    program.write_text(FORMATS)
    done = launch(*words, str(program))
    assert done.returncode == 0, done.stderr
    *_, single, double, formats = done.stdout.splitlines()  # torch_xla prints that a variable is deprecated
    assert [single, double] == [f"torch.float32 {stored[0]}", f"torch.float64 {stored[1]}"]
    assert formats == f"{name} torch.float32 torch.float32"


def test_a_notebook_starts_a_process_for_every_device_or_none(tmp_path):
    program = tmp_path / "notebook.py"
    program.write_text(NOTEBOOK)
    done = run(sys.executable, str(program))
    assert done.returncode == 0, done.stderr
    of_each, of_one, too_many, in_use = done.stdout.splitlines()
    assert of_each == "{0: ('a', 'xla:0', 1, 'bf16')}"
    assert of_one == "{0: 1}"
    assert "notebook_launcher(num_processes=8): PJRT runs 1" in too_many
    assert "This process has initialised xla" in in_use
