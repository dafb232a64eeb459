"""Inside a real `srun`, where Slurm runs on this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest


def has_slurm():
    """Whether a node would take a job now."""
    if shutil.which("srun") is None or shutil.which("sinfo") is None:
        return False
    told = subprocess.run(
        ["sinfo", "-h", "-o", "%t"], capture_output=True, text=True, check=False, timeout=60
    )
    return told.returncode == 0 and bool({"idle", "mix"} & set(told.stdout.split()))


pytestmark = pytest.mark.skipif(not has_slurm(), reason="no Slurm runs on this machine")

TRAIN = """\
import json, os, pathlib
import torch
from accel import Accelerator

accelerator = Accelerator(cpu=True)
total = accelerator.reduce(torch.ones(1) * (accelerator.process_index + 1), "sum")
facts = {"world": accelerator.num_processes, "sum": total.item(), "local": accelerator.local_process_index,
         "precision": str(accelerator.mixed_precision),
         "machines": os.environ.get("GROUP_WORLD_SIZE", "none")}
pathlib.Path(os.environ["TELL_TO"], f"{accelerator.process_index}.json").write_text(json.dumps(facts))
accelerator.wait_for_everyone()
"""


@pytest.fixture
def job(tmp_path):
    """Run a command line by srun; give how it ended and what each process told."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*line):
        environ = {**os.environ, "HF_HOME": str(tmp_path), "TELL_TO": str(tmp_path)}
        done = subprocess.run(
            ["srun", *line], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        return done, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]

    return run


def facts_of(local, precision, machines):
    return {"world": 2, "local": local, "sum": 3.0, "precision": precision, "machines": machines}


def test_each_task_of_srun_is_a_process_of_training(job):
    done, facts = job("-n", "2", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    assert facts == [facts_of(rank, "no", "none") for rank in range(2)]


def test_the_command_inside_several_tasks_becomes_the_script(job):
    line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--mixed_precision", "bf16", "train.py"]
    done, facts = job("-n", "2", *line)
    assert done.returncode == 0, done.stderr
    assert facts == [facts_of(rank, "bf16", "none") for rank in range(2)]


def test_the_command_inside_one_task_starts_the_processes_of_its_machine(job):
    line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2", "train.py"]
    done, facts = job("-n", "1", *line)
    assert done.returncode == 0, done.stderr
    assert facts == [facts_of(rank, "no", "1") for rank in range(2)]
