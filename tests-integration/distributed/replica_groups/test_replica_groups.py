"""Replica groups by torchft, killed and healed: `accel launch --replica_groups` with real processes."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_state.libraries import is_installed

pytestmark = pytest.mark.skipif(not is_installed("torchft"), reason="needs torchft")

SAMPLES, BATCH, EPOCHS = 1280, 4, 2
STEPS = EPOCHS * SAMPLES // (2 * BATCH)
SCRIPT = """\
import glob, hashlib, os, signal, sys, time
import torch
from accel import Accelerator
from accel.utils import ProjectConfiguration
from parts import make

folder, kills = sys.argv[1], dict(item.split(":") for item in sys.argv[2].split(","))
group, life = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["ACCELERATE_REPLICA_RESTARTS"])
dies, own_steps = kills.get(f"{group}.{life}", ""), 0
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, step_scheduler_per="update", project_config=project)
registered = torch.nn.Linear(1, 1)
accelerator.register_for_checkpointing(registered)
data, model, optimizer, schedule = make(group)
loader = torch.utils.data.DataLoader(data, batch_size=4)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
groups = accelerator._parts.strategy.replicas
rows = open(f"{folder}/rows.{group}.{life}", "w", buffering=1)
open(f"{folder}/ready.{group}.{life}", "w").close()

def lives(of):
    return len(glob.glob(f"{folder}/{of}.{1 - group}.*"))

first, last = True, time.monotonic()
while loader.iteration < 2:
    for index, inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step, now = groups.manager.current_step(), time.monotonic()
        counts = not optimizer.step_was_skipped and groups.manager.is_participating()
        print(loader.iteration, step, int(counts), loss.item(), now - last, *index.tolist(), file=rows)
        last = now
        if groups.manager.num_participants() < 2:
            while lives("ready") <= lives("dead"):
                time.sleep(0.05)
            time.sleep(float(sys.argv[3]))  # the other group is back, and asks to be healed
            last = time.monotonic()
        if step % 50 == 0:
            accelerator.save_state()
        own_steps += 1
        if dies in {str(step), f"+{own_steps}"}:
            open(f"{folder}/dead.{group}.{life}", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
registered = registered.weight.item()
end = [group, groups.manager.current_step(), schedule.get_last_lr()[0], digest, registered]
os.write(1, (" ".join(map(str, ["END", *end])) + "\\n").encode())  # at once: lines of groups would mix
torch.save([p.detach() for p in model.parameters()], f"{folder}/weights.{group}")
"""
PARTS = """\
import torch

def make(seed):
    x = torch.randn(1280, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(torch.arange(1280), x, x.sum(1, keepdim=True).sin())
    torch.manual_seed(seed)  # every group begins with other weights
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return data, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.5)
"""

_space: dict[str, Any] = {}
exec(PARTS, _space)
make = _space["make"]


def run(folder: Path, kills: dict[str, str], pause: float = 0.1) -> tuple[str, list[list[str]]]:
    """Run two groups, and return the output and the last lines.

    Args:
        folder: Where they write.
        kills: By `group.life` the step after which a group dies, with a plus sign that of its life.
        pause: Seconds that a step takes while a group is missing.
    """
    (folder / "train.py").write_text(SCRIPT)
    (folder / "parts.py").write_text(PARTS)
    spelled = ",".join(f"{name}:{step}" for name, step in kills.items())
    options = ("--cpu", "--replica_groups", "2", "--replica_timeout", "2", "--max_restarts", str(len(kills)))
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *options, "train.py", str(folder), spelled, str(pause)],
        capture_output=True, text=True, check=False, cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    ends = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("END")]
    assert len(ends) == 2, output
    return output, ends


def rows_of(folder: Path, name: str) -> list[list[float]]:
    text = (folder / f"rows.{name}").read_text().splitlines()
    return [[float(word) for word in line.split()] for line in text]


def plain(seed: int) -> tuple[list[list[float]], float]:
    """Train in one process, undisturbed; return the losses of the two groups by step, and of all data."""
    losses, model = plain_model(seed)
    return losses, total_loss(make(seed)[0], model)


def plain_model(seed: int) -> tuple[list[list[float]], torch.nn.Module]:
    """Train in one process; return the losses of the two groups by step, and the model."""
    data, model, optimizer, schedule = make(seed)
    losses: list[list[float]] = []
    for _ in range(EPOCHS):
        for begin in range(0, SAMPLES, 2 * BATCH):
            own: list[torch.Tensor] = []
            for start in (begin, begin + BATCH):
                _, inputs, targets = data[start : start + BATCH]
                own.append(torch.nn.functional.mse_loss(model(inputs), targets))
            (sum(own) / 2).backward()  # pyright: ignore[reportAttributeAccessIssue] - a tensor
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append([loss.item() for loss in own])
    return losses, model


def total_loss(data: torch.utils.data.TensorDataset, model: torch.nn.Module) -> float:
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(data[:][1]), data[:][2]).item()


def check_end(folder: Path, ends: list[list[str]]) -> None:
    """Check that groups have ended alike, and trained as well as an undisturbed run."""
    assert {end[0] for end in ends} == {"0", "1"}
    assert ends[0][1:] == ends[1][1:], "steps, rate, weights and registered objects are equal"
    assert int(ends[0][1]) == STEPS
    data, model, _, _ = make(0)
    before = total_loss(data, model)
    with torch.no_grad():
        weights = torch.load(folder / "weights.0", weights_only=True)
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    undisturbed = [plain(seed)[1] for seed in (0, 1)]
    assert total_loss(data, model) < max(undisturbed) + 0.1 * before


@pytest.mark.parametrize("both_die", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_killed_group_is_healed_and_two_killed_groups_load_the_last_checkpoint(
    tmp_path: Path, both_die: bool
) -> None:
    output, ends = run(tmp_path, {"1.0": "20"} | ({"0.0": "230", "1.1": "230"} if both_die else {}))
    check_end(tmp_path, ends)
    # 1. Until the kill the groups train as a single process does.
    first = {group: rows_of(tmp_path, f"{group}.0") for group in (0, 1)}
    expected = [plain(seed)[0][:20] for seed in (0, 1)]
    losses = [[first[0][step][3], first[1][step][3]] for step in range(20)]
    assert any(torch.allclose(torch.tensor(losses), torch.tensor(own), atol=1e-5) for own in expected)
    # 2. The group that comes back goes on where the other is, and what it missed is in the log.
    healed = re.search(r"Replica group 1 is healed in step (\d+)", output)
    assert healed is not None, output
    step = int(healed[1])
    assert f"in steps 21 to {step} are given up" in output, output
    back = rows_of(tmp_path, "1.1")
    assert [row[1] for row in back[:2]] == [step, step + 1]
    counted = Counter(
        (row[0], sample)
        for name in ("0.0", "1.0", "1.1")
        for row in rows_of(tmp_path, name)
        if row[2] and row[1] <= 160
        for sample in row[5:]
    )
    assert set(counted.values()) == {1}, "no sample counts twice"
    assert len(counted) == SAMPLES - BATCH * (step - 20), "those that were given up, and no others"
    # 3. The other group has waited for the time after which a silent group counts as lost.
    assert max(row[4] for row in first[0]) > 1.5
    # 4. Both are killed after a checkpoint of step 200: they load it, and tell.
    if both_die:
        assert "loaded the last checkpoint" in output
        assert "begins at step 0" not in output
        resumed = [row[1] for name in ("0.1", "1.2") for row in rows_of(tmp_path, name)]
        assert min(resumed) == 201  # by the group that was first; it heals the other


OF_TWO = """\
import os, sys
import torch
from accel import Accelerator
from parts import make

accelerator = Accelerator(cpu=True, step_scheduler_per="update")
group = int(os.environ["REPLICA_GROUP_ID"])
data, model, optimizer, schedule = make(10 * group + accelerator.process_index)
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
while loader.iteration < 2:
    for index, inputs, targets in loader:
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
values = [parameter.detach() for parameter in model.parameters()]
torch.save(values, f"{sys.argv[1]}/weights.{group}.{accelerator.process_index}")
"""


@pytest.mark.thorough
def test_groups_of_two_ranks_train_as_a_single_process_does(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OF_TWO)
    (tmp_path / "parts.py").write_text(PARTS)
    options = ("--cpu", "--replica_groups", "2", "--num_processes", "4", "--max_restarts", "0")
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *options, "train.py", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    names = [f"weights.{group}.{rank}" for group in (0, 1) for rank in (0, 1)]
    first, *others = (torch.load(tmp_path / name, weights_only=True) for name in names)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    expected = [plain_model(seed)[1] for seed in (0, 10)]  # of the group that torchft chooses
    assert any(
        all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, model.parameters(), strict=True))
        for model in expected
    )


@pytest.mark.thorough
def test_fifty_kills_leave_equal_groups_and_the_loss_of_an_undisturbed_run(tmp_path: Path) -> None:
    choose = random.Random(0)
    for part in range(10):
        folder = tmp_path / str(part)
        folder.mkdir()
        kills = {f"1.{life}": f"+{choose.randint(3, 20)}" for life in range(5)}
        output, ends = run(folder, kills, pause=0.5)
        check_end(folder, ends)
        assert "restart 5 of 5" in output
