"""Training whose job is preempted again and again loses no step, and ends like an undisturbed run."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch import nn

from accel_plugins.kwargs import DataLoaderConfiguration, ProjectConfiguration
from accel_state import hang_monitor
from accel_train import Accelerator
from accel_train.checkpoint import preemption
from harness import distributed
from harness.killing import mortal
from harness.pool import Job, Nursery, shared_nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS, PREEMPTED = 3, 143


@mortal
def train(folder: str, workers: int) -> None:
    """Train from wherever the last run was; note every batch, the end, and the exit code of this run."""
    torch.set_num_threads(1)
    hang_monitor.INTERVAL_S = 0.05  # of this process, which ends with the run
    project = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=2, save_on_preemption=True
    )
    accelerator = Accelerator(
        cpu=True, project_config=project, dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    data, kind = torch.arange(48.0).view(48, 1) / 48, torch.utils.data.DataLoader
    loader = kind(data, batch_size=2, shuffle=True, num_workers=workers)
    # Without DistributedDataParallel, which takes new processes seconds to import.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    evaluation = accelerator.prepare(kind(data[:4], batch_size=1))
    if accelerator.has_checkpoint:
        accelerator.load_state()
    rank = accelerator.process_index
    log, code = Path(folder, f"batches{rank}"), 0
    step = len(log.read_text().splitlines()) if log.exists() else 0
    try:
        while loader.iteration < EPOCHS:
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                for parameter in model.parameters():
                    parameter.grad = accelerator.reduce(parameter.grad, "mean")
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                if step % 4 == 0:
                    assert len([*evaluation]) == 4 / accelerator.num_processes
                time.sleep(0.01)
                with log.open("a") as file:
                    file.write(f"{loader.iteration} {(batch * 48).int().flatten().tolist()}\n")
                Path(folder, f"ready{rank}").touch()
        if accelerator.is_main_process:
            torch.save([p.detach() for p in model.parameters()], Path(folder, "result"))
    except SystemExit as error:
        code = error.code
    Path(folder, f"code{rank}").write_text(f"{code}")


def run(nursery: Nursery, world_size: int, folder: Path, workers: int, notice: Any = None) -> list[int]:
    """Run the training on new ranks, give them a notice when all are at work; return their exit codes."""
    for old in [*folder.glob("ready*"), *folder.glob("code*")]:
        old.unlink()
    ranks = nursery.spawn(world_size)
    job = Job(__name__, __file__, train.__qualname__, {"folder": str(folder), "workers": workers})
    for rank in ranks:
        rank.link.send_bytes(pickle.dumps(job))
    if notice is not None:
        while len([*folder.glob("ready*")]) < world_size and not [*folder.glob("code*")]:
            time.sleep(0.005)
        notice([rank.pid for rank in ranks])
    for rank in ranks:
        answer = pickle.loads(rank.link.recv_bytes())
        assert answer.error is None, answer.error
        rank.link.close()
    return [int((folder / f"code{rank}").read_text()) for rank in range(world_size)]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: no machine dies here, so that no disk is needed."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize("notices", [3, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("world_size", "workers"), [(1, 1), (2, 0)])
def test_notices_of_preemption_cost_no_step_and_change_nothing(
    memory: Path, world_size: int, workers: int, notices: int
) -> None:
    chance, nursery = random.Random(world_size), shared_nursery()
    undisturbed = memory / "undisturbed"
    undisturbed.mkdir()
    assert run(nursery, world_size, undisturbed, workers) == [0] * world_size

    def steps_of(folder: Path) -> int:
        return len((folder / "batches0").read_text().splitlines())

    num_steps = steps_of(undisturbed)

    def give_notice(pids: list[int]) -> None:
        """Send a signal at any moment: to one rank, or to all processes of the job, data workers included."""
        left = num_steps - steps_of(folder)
        stop = num_steps - left + chance.randrange(1 + left * 3 // 4)
        while steps_of(folder) < stop and not [*folder.glob("code*")]:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.01)
        chosen, number = chance.choice([pids, pids[-1:]]), chance.choice([signal.SIGTERM, signal.SIGUSR1])
        for pid in chosen:
            targets: list[psutil.Process] = []
            with suppress(psutil.NoSuchProcess):
                targets.append(process := psutil.Process(pid))
                targets += process.children(recursive=True)
            for target in targets:
                with suppress(psutil.NoSuchProcess):  # a data worker may end meanwhile
                    target.send_signal(number)

    given = heeded = count = 0
    while given < notices:
        folder, count = memory / f"run{count}", count + 1
        folder.mkdir()
        codes = [PREEMPTED]
        while codes[0] == PREEMPTED:
            notice = give_notice if given < notices else None
            given += notice is not None
            codes = run(nursery, world_size, folder, workers, notice)
            heeded += codes[0] == PREEMPTED
            assert len({*codes}) == 1, codes
        for name in [f"batches{rank}" for rank in range(world_size)]:
            assert (folder / name).read_text() == (undisturbed / name).read_text()
        assert all(map(torch.equal, torch.load(undisturbed / "result"), torch.load(folder / "result")))
    assert heeded
    print(f"{given} notices, of which {heeded} came before the last step, in {count} trainings")


SCRIPT = """\
import os, sys, time
import torch
from accel import Accelerator
from accel.utils import DataLoaderConfiguration, ProjectConfiguration

project = ProjectConfiguration(sys.argv[1], automatic_checkpoint_naming=True, save_on_preemption=True)
accelerator = Accelerator(
    project_config=project, dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)
)
# No model or optimizer, for which torch imports its compiler for 4 s: the test above trains.
loader = accelerator.prepare(torch.utils.data.DataLoader(range(400)))
if resumed := accelerator.has_checkpoint:
    accelerator.load_state()
steps = 0
for batch in loader:
    steps += 1
    if not resumed:
        accelerator.print("at work", flush=True)
        time.sleep(0.5)
    accelerator.exit_if_preempted()
accelerator.print("steps", steps, "life", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
"""


def test_the_launcher_passes_a_notice_on_and_does_not_start_the_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [sys.executable, "-m", "accel_cli", "launch", "--cpu", "--num_processes=2"]
    line += ["--main_process_port=0", "--max_restarts=3", "train.py", str(tmp_path)]
    with subprocess.Popen(line, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "at work\n"
        os.kill(job.pid, signal.SIGUSR1)
        told = job.stdout.read()
    assert job.returncode == PREEMPTED
    assert "steps" not in told
    done = 1 + told.count("at work")
    again = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert again.stdout == f"steps {200 - done} life 0\n"


@distributed(world_size=2)
def test_a_notice_where_ranks_have_uneven_inputs_is_heeded_when_all_have_none_left(tmp_path: Path) -> None:
    project = ProjectConfiguration(tmp_path, automatic_checkpoint_naming=True, save_on_preemption=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = nn.Linear(1, 1, bias=False)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(5, 1), batch_size=1))
    steps = 0

    def train() -> None:
        nonlocal steps
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                if steps == 3:  # on the main process alone
                    signal.raise_signal(signal.SIGUSR1)
        raise AssertionError("the notice was not heeded")

    with pytest.raises(SystemExit) as exited:
        train()
    assert (exited.value.code, steps) == (PREEMPTED, 3 - accelerator.process_index)
    assert accelerator.has_checkpoint
    preemption.end()
