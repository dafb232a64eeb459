"""A third party's launcher: installed by entry point, selected by flag, it starts and explains a job."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from extending.installed import install

SCRIPT = """
import os
import torch
from accel_train import Accelerator

accelerator = Accelerator(cpu=True)
ranks = accelerator.gather(torch.tensor([accelerator.process_index]))
world = os.environ["EXAMPLE_PROCESSES"]
line = f"rank {accelerator.process_index} of {world} gathered {ranks.tolist()}\\n"
os.write(1, line.encode())  # at once: print writes the end of the line by itself
accelerator.end_training()
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def launch(tmp_path):
    folder = install(tmp_path / "site")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def run(*flags):
        environ = {**os.environ, "PYTHONPATH": str(folder), "EXAMPLE_PORT": str(free_port())}
        line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", *flags, str(script)]
        return subprocess.run(line, env=environ, capture_output=True, text=True, check=False)

    return run


def test_a_selected_launcher_starts_the_processes(launch):
    done = launch("--launcher", "example_spawn", "--num_processes", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2 gathered [0, 1]" for rank in range(2)]


def test_a_launcher_explains_itself(launch):
    done = launch("--launcher", "example_spawn", "--num_processes", "2", "--explain")
    assert done.returncode == 0, done.stderr
    assert "a program of a third party starts the processes of this machine" in done.stdout
    assert "-m accel_example.spawn 2" in done.stdout
    assert "EXAMPLE_PROCESSES=2" in done.stdout


def test_an_installed_launcher_that_is_not_selected_changes_nothing(launch):
    done = launch("--num_processes", "2", "--explain")
    assert "torch.distributed.run starts the processes of this machine" in done.stdout


def test_a_launcher_that_cannot_start_what_was_asked_for_is_refused(launch):
    done = launch("--launcher", "simple", "--num_processes", "2")
    assert done.returncode != 0
    assert "selects the launcher 'simple' (one process, this one), which cannot start" in done.stderr
    assert "'torchrun' can" in done.stderr
    done = launch("--launcher", "example_spwan")
    assert "There is no launcher 'example_spwan'" in done.stderr
    assert "did you mean 'example_spawn'?" in done.stderr


def test_the_last_look_of_a_launcher_is_heeded(launch):
    more = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", "29500")
    done = launch("--launcher", "example_spawn", "--num_processes", "2", *more)
    assert done.returncode != 0
    assert "example_spawn starts the processes of one machine." in done.stderr
