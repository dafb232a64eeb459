"""Replica groups whose ranks have shards (HSDP): FSDP2 in each group, torchft over the groups."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accel_state.libraries import is_installed

pytestmark = pytest.mark.skipif(not is_installed("torchft"), reason="needs torchft")

SAMPLES, BATCH, EPOCHS = 320, 2, 2
DIES, SAVED = 15, 10  # steps
SCRIPT = """\
import os, signal, sys, time
import torch
from accel import Accelerator, FullyShardedDataParallelPlugin
from accel.utils import ProjectConfiguration
from parts import make

folder, dies = sys.argv[1], int(sys.argv[2])
group, life = int(os.environ["REPLICA_GROUP_ID"]), int(os.environ["ACCELERATE_REPLICA_RESTARTS"])
project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True)
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
accelerator = Accelerator(
    cpu=True, step_scheduler_per="update", project_config=project, fsdp_plugin=plugin
)
rank = accelerator.process_index
data, model, optimizer, schedule = make(group)  # every group begins with other weights
loader = torch.utils.data.DataLoader(data, batch_size=2)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
groups = accelerator._parts.strategy.replicas
open(f"{folder}/ready.{life}", "w").close()
rows = open(f"{folder}/rows.{group}.{rank}.{life}", "w", buffering=1)
while loader.iteration < 2:
    for index, inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step = groups.manager.current_step()
        counts = not optimizer.step_was_skipped and groups.manager.is_participating()
        print(loader.iteration, step, int(counts), loss.item(), *index.tolist(), file=rows)
        if groups.manager.num_participants() < 2:
            while not os.path.exists(f"{folder}/ready.1"):
                time.sleep(0.1)
            time.sleep(0.2)  # until the other group is back
        if step == 10:
            accelerator.save_state()
        if (group, life, step) == (1, 0, dies) and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
full = accelerator.get_state_dict(model)
end = {
    "step": groups.manager.current_step(),
    "rate": schedule.get_last_lr(),
    "weights": full if rank == 0 else None,
    "shards": [parameter.detach().to_local() for parameter in model.parameters()],
    "moments": [
        value.to_local()
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if hasattr(value, "to_local")
    ],
}
torch.save(end, f"{folder}/end.{group}.{rank}")
"""
PARTS = """\
import torch

def make(seed):
    x = torch.randn(320, 4, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(torch.arange(320), x, x.sum(1, keepdim=True).sin())
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return data, model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.5)
"""


def losses_of_one_process(steps: int) -> list[list[float]]:
    """Train in one process; return the losses of the four ranks, by step."""
    space: dict[str, object] = {}
    exec(PARTS, space)
    data, model, optimizer, schedule = space["make"](0)  # pyright: ignore[reportCallIssue] - a function
    losses: list[list[float]] = []
    for step in range(steps):
        begin = step * 4 * BATCH
        own: list[torch.Tensor] = []
        for start in range(begin, begin + 4 * BATCH, BATCH):
            _, inputs, targets = data[start : start + BATCH]
            own.append(torch.nn.functional.mse_loss(model(inputs), targets))
        torch.stack(own).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in own])
    return losses


@pytest.mark.thorough
def test_a_group_of_shards_is_healed_by_the_other_rank_by_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text(PARTS)
    options = ("--cpu", "--replica_groups", "2", "--num_processes", "4", "--replica_timeout", "2")
    done = subprocess.run(
        [sys.executable, "-m", "accel_cli", "launch", *options, "train.py", str(tmp_path), str(DIES)],
        capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 0, output

    def rows_of(group: int, rank: int, life: int) -> list[list[float]]:
        text = (tmp_path / f"rows.{group}.{rank}.{life}").read_text().splitlines()
        return [[float(word) for word in line.split()] for line in text]

    # 1. Until the kill the four ranks train as a single process with the weights of the first group does.
    first = [rows_of(group, rank, 0) for group in (0, 1) for rank in (0, 1)]
    losses = [[rows[step][3] for rows in first] for step in range(DIES)]
    assert torch.allclose(torch.tensor(losses), torch.tensor(losses_of_one_process(DIES)), atol=1e-5)
    # 2. The group that comes back has loaded the checkpoint, which one group has saved, and goes on where the
    # other is.
    assert "loaded the last checkpoint" in output, output
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 1
    healed = re.search(r"Replica group 1 is healed in step (\d+)", output)
    assert healed is not None, output
    for rank in (0, 1):
        back = rows_of(1, rank, 1)
        assert [row[1] for row in back[:2]] == [int(healed[1]), int(healed[1]) + 1]
        assert [row[2] for row in back[:2]] == [0, 1], "its own batch of the first step does not count"
    # 3. At the end the groups have the same, bit for bit: each rank its shards of weights and moments.
    ends = {
        (group, rank): torch.load(tmp_path / f"end.{group}.{rank}", weights_only=True)
        for group in (0, 1)
        for rank in (0, 1)
    }
    assert {end["step"] for end in ends.values()} == {EPOCHS * SAMPLES // (4 * BATCH)}
    for rank in (0, 1):
        mine, other = ends[0, rank], ends[1, rank]
        assert mine["rate"] == other["rate"]
        assert len(mine["moments"]) == 8
        for kind in ("shards", "moments"):
            assert all(torch.equal(a, b) for a, b in zip(mine[kind], other[kind], strict=True)), kind
    full, again = ends[0, 0]["weights"], ends[1, 0]["weights"]
    assert all(torch.equal(full[name], again[name]) for name in full)
