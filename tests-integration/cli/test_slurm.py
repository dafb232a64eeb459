"""Real Slurm, of two nodes on this machine: inside `srun`, and jobs that `accel launch` submits."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from harness.slurm import SKIP, LocalSlurm

pytestmark = pytest.mark.skipif(bool(SKIP), reason=SKIP)


@pytest.fixture(scope="module")
def slurm():
    with LocalSlurm() as cluster:
        yield cluster


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
def job(tmp_path, slurm):
    """Run a command line by srun; give how it ended and what each process told."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*line):
        environ = {**os.environ, **slurm.environ, "HF_HOME": str(tmp_path), "TELL_TO": str(tmp_path)}
        done = subprocess.run(
            ["srun", "-N", "1", *line],
            cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
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


PREEMPTIBLE = """\
import os, sys, time
import torch
from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

accelerator = Accelerator(
    project_config=ProjectConfiguration("run", automatic_checkpoint_naming=True, save_on_preemption=True),
    dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
)
set_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data))
if resumed := accelerator.has_checkpoint:
    accelerator.load_state()
steps = 0
for batch in loader:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
    if not resumed:
        accelerator.print("at work", flush=True)
        time.sleep(0.5)
world = accelerator.num_processes
accelerator.print("steps", steps, world, os.environ["SLURM_NNODES"], sys.argv[1:], flush=True)
"""
WORDS = ["a 'word'", '$HOME "x" `id`', "--signal=KILL"]


@contextmanager
def started(folder, slurm, *line):
    """Start `accel launch --launcher slurm`; give it with the number of its job, and end both."""
    command = [sys.executable, "-m", "accel_cli", "launch", "--launcher", "slurm", "--cpu", *line]
    environ = {**os.environ, **slurm.environ, "HF_HOME": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launch:
        try:
            submitted = launch.stderr.readline()
            assert "was submitted" in submitted, submitted + launch.stderr.read()
            yield launch, re.search(r"job (\d+)", submitted)[1]
        finally:
            launch.terminate()  # which cancels the job


@pytest.mark.thorough
def test_a_job_of_two_nodes_that_is_preempted_is_queued_again_and_resumes(slurm, tmp_path):
    (tmp_path / "train.py").write_text(PREEMPTIBLE)
    line = ["--nodes", "2", "--num_processes", "2", "--time", "5", "--max_restarts", "1", "train.py", *WORDS]
    with started(tmp_path, slurm, *line) as (launch, job):
        output = launch.stdout.readline()
        assert output[1:] == ": at work\n", output + launch.stderr.read()
        slurm.run("scancel", "--signal=TERM", job)  # what a time limit and a preemption do first
        output += launch.stdout.read()
        assert launch.wait() == 0, launch.stderr.read()
    done = output.count("0: at work")
    assert f"0: steps {30 - done} 2 2 {WORDS}\n" in output
    assert "the job ended with 143 and is queued again" in output


def test_a_job_that_fails_has_the_exit_code_of_its_script(slurm, tmp_path):
    (tmp_path / "fail.py").write_text("import sys\nsys.exit(5)\n")
    line = ["--sbatch_args", "--comment='a b' --output=%x.txt", "fail.py"]
    with started(tmp_path, slurm, *line) as (launch, job):
        output, problems = launch.communicate()
    assert launch.returncode == 5
    assert f"job {job} has ended: FAILED" in problems
    assert "Exited with exit code 5" in output
    assert "Exited with exit code 5" in (tmp_path / "fail.txt").read_text()


def test_ctrl_c_cancels_the_job(slurm, tmp_path):
    with started(tmp_path, slurm, "--no_python", "sleep", "600") as (launch, job):
        while "JobState=RUNNING" not in slurm.run("scontrol", "show", "job", job):
            time.sleep(0.1)
        launch.send_signal(signal.SIGINT)
        _, problems = launch.communicate()
    assert launch.returncode == 130
    assert f"job {job} has ended: CANCELLED" in problems


def test_what_sbatch_refuses_is_said_and_nothing_is_followed(slurm, tmp_path):
    (tmp_path / "x.py").write_text("")
    line = [
        sys.executable,
        "-m",
        "accel_cli",
        "launch",
        "--launcher=slurm",
        "--sbatch_args=-p nowhere",
        "x.py",
    ]
    environ = {**os.environ, **slurm.environ, "HF_HOME": str(tmp_path)}
    done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid partition specified: nowhere" in done.stderr
