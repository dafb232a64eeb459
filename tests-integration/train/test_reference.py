"""The reference reads our checkpoints, and we read the reference's.

Runs where the variable REFERENCE_PYTHON names the interpreter of an environment with the reference.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from accel_plugins.kwargs import ProjectConfiguration
from accel_train import Accelerator

if TYPE_CHECKING:
    from pathlib import Path

REFERENCE = os.environ.get("REFERENCE_PYTHON")

pytestmark = pytest.mark.skipif(REFERENCE is None, reason="REFERENCE_PYTHON names no interpreter")

COMMON = """
import json, random, sys
import numpy as np, torch
from torch import nn

class Counter:
    value = 0
    def state_dict(self): return {"value": self.value, "ema": torch.ones(2)}
    def load_state_dict(self, state): self.value = state["value"]

def build(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    loader = torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2, shuffle=True)
    parts = accelerator.prepare(model, optimizer, scheduler, loader)
    second = accelerator.prepare(nn.Linear(2, 2))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return (*parts, second, counter)

def train(accelerator, parts):
    model, optimizer, scheduler, loader, second, counter = parts
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
    counter.value += 1

def tell(parts):
    model, optimizer, scheduler, loader, second, counter = parts
    moments = [state["exp_avg"].sum().item() for state in optimizer.state.values()]
    return {
        "weights": [parameter.tolist() for parameter in (*model.parameters(), *second.parameters())],
        "moments": moments, "rate": scheduler.get_last_lr(), "counter": counter.value,
        "drawn": [random.random(), float(np.random.rand()), torch.rand(()).item()],
    }
"""

SAVES = """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
parts = build(accelerator)
train(accelerator, parts)
accelerator.save_state(sys.argv[1], safe_serialization=sys.argv[2] == "safe")
print(json.dumps(tell(parts)))
"""

LOADS = """
import accelerate
accelerator = accelerate.Accelerator(cpu=True)
parts = build(accelerator)
accelerator.load_state(sys.argv[1])
print(json.dumps(tell(parts)))
"""


def reference(script: str, *arguments: str) -> dict:
    assert REFERENCE is not None
    answer = subprocess.run(
        [REFERENCE, "-c", COMMON + script, *arguments], check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture
def ours() -> dict:
    names: dict = {"random": random, "np": np, "sys": sys}
    exec(COMMON, names)
    return names


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safe", "pickled"])
def test_the_reference_reads_our_checkpoint(tmp_path: Path, ours: dict, form: str) -> None:
    accelerator = Accelerator(cpu=True)
    parts = ours["build"](accelerator)
    ours["train"](accelerator, parts)
    accelerator.save_state(tmp_path / "c", safe_serialization=form == "safe")
    assert reference(LOADS, str(tmp_path / "c")) == ours["tell"](parts)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["safe", "pickled"])
def test_we_read_the_checkpoint_of_the_reference(tmp_path: Path, ours: dict, form: str) -> None:
    path = tmp_path / "checkpoints" / "checkpoint_4"
    told = reference(SAVES, str(path), form)
    project = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    parts = ours["build"](accelerator)
    assert accelerator.has_checkpoint
    accelerator.load_state()
    assert ours["tell"](parts) == told
    assert accelerator.save_iteration == 5
