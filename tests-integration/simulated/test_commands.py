"""The command on a machine whose accelerator is simulated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness import simulated

TRAINING = """\
import json, sys
import torch
from accel import Accelerator
accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
inputs = torch.arange(8.0).view(2, 4)[accelerator.process_index % 2 :][:1].to(accelerator.device)
for _ in range(3):
    loss = model(inputs).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    state = accelerator.state
    print(json.dumps([str(state.device), state.num_processes, str(state.distributed_type), loss.item()]))
accelerator.end_training()
"""


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    simulated.require()


def accel(*arguments: str, folder: Path) -> str:
    command = [sys.executable, "-m", "accel_cli", *arguments]
    environ = {**simulated.environment("npu"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loss_on_the_cpu() -> float:
    """The last loss of the first row, trained on both rows in this process."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = torch.empty(0)
    for _ in range(3):
        losses = model(torch.arange(8.0).view(2, 4)).square()
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
    return losses[0].item()


def test_a_job_is_launched_on_the_accelerators_and_trains_as_on_the_cpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    said = accel("launch", "--num_processes", "2", "train.py", folder=tmp_path).splitlines()[-1]
    *state, loss = json.loads(said)
    assert state == ["npu:0", 2, "DistributedType.MULTI_NPU"]
    assert loss == pytest.approx(loss_on_the_cpu(), rel=1e-5)


def test_env_lists_the_accelerators(tmp_path: Path) -> None:
    text = accel("env", folder=tmp_path)
    assert "npu" in text
    assert "hccl" in text
    assert text.count("Simulated accelerator, 1.1 GB") == 2


@pytest.mark.thorough  # with every commit, the job above, and the self-test on the CPU
def test_the_self_test_passes(tmp_path: Path) -> None:
    accel("test", folder=tmp_path)


@pytest.mark.thorough  # with every commit on the CPU, in accel-inspect
def test_memory_is_estimated(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "vocab_size": 100, "architectures": ["LlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    assert "float32" in accel("estimate-memory", str(tmp_path), folder=tmp_path)
