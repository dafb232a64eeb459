"""A worker that is killed comes back, and training goes on from the newest complete checkpoint."""

from __future__ import annotations

import runpy
import subprocess
import sys
from unittest.mock import patch

import pytest
import torch

from harness import distributed

SCRIPT = """\
import os, pathlib, signal, sys

import torch

from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed

class Momentum:
    def __init__(self, model):
        self.parameters = [*model.parameters()]
        self.averages = [torch.zeros_like(parameter) for parameter in self.parameters]

    def state_dict(self):
        return {"averages": self.averages}

    def load_state_dict(self, state):
        self.averages = state["averages"]

    @torch.no_grad()
    def step(self, accelerator):
        for parameter, average in zip(self.parameters, self.averages):
            average.mul_(0.9).add_(accelerator.reduce(parameter.grad, "mean"))
            parameter.sub_(0.01 * average)
            parameter.grad = None

folder, kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(
    project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2),
    dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True),
)
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
# Neither DDP nor an optimizer of torch, for which each life imports torch's compiler for 4 s.
model = accelerator.prepare_model(model, evaluation_mode=True)
momentum = Momentum(model)
accelerator.register_for_checkpointing(momentum)
data = torch.randn(52, 4, generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
loader = accelerator.prepare(loader)
if accelerator.has_checkpoint:
    accelerator.load_state()
lives = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
steps = 0
while loader.iteration < 3:
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        momentum.step(accelerator)
        steps += 1
        if steps % 4 == 0:
            accelerator.save_state()
        if lives < kills and steps == 10 and accelerator.is_last_process:
            os.kill(os.getpid(), signal.SIGKILL)
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    weights = [parameter.detach() for parameter in model.parameters()]
    torch.save({"weights": weights, "lives": lives, "steps": steps}, folder / "end")
"""


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.thorough)])
def resumed(request, tmp_path):
    """How often a worker of a training is killed, and how that ends."""
    folder, script = tmp_path / "resumed", tmp_path / "train.py"
    folder.mkdir()
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes", "2"]
    command += ["--main_process_port", "0", "--max_restarts", "3", "--monitor_interval", "0.1"]
    done = subprocess.run(
        [*command, script, folder, str(request.param)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return request.param, torch.load(folder / "end", weights_only=True)


@distributed(world_size=2)
def test_training_whose_worker_is_killed_ends_like_undisturbed_training(resumed, tmp_path):
    folder = tmp_path / "undisturbed"
    folder.mkdir(exist_ok=True)
    with patch.object(sys, "argv", ["train.py", str(folder), "0"]):
        runpy.run_path(str(tmp_path / "train.py"), run_name="__main__")
    torch.distributed.barrier()
    undisturbed = torch.load(folder / "end", weights_only=True)
    assert (undisturbed["lives"], undisturbed["steps"]) == (0, 39)
    kills, resumed = resumed
    assert resumed["lives"] == kills
    assert resumed["steps"] == 39 - kills * 8, (
        "each life loses the steps after its last checkpoint, no others"
    )
    for found, wanted in zip(resumed["weights"], undisturbed["weights"], strict=True):
        assert torch.equal(found, wanted)
