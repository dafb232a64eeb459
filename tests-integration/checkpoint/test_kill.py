"""Training that is killed while it saves resumes, whatever the moment, and ends like an undisturbed run."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import signal
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from accel_plugins.kwargs.project import ProjectConfiguration
from accel_train import Accelerator
from accel_train.checkpoint import files
from harness.pool import Job, Nursery, bodies

if TYPE_CHECKING:
    from collections.abc import Iterator

KILLS = 100
EPOCHS = 2
HERE = str(Path(__file__).resolve())
CHANGES = frozenset({"open", "write", "fsync", "mkdir", "replace"})


class Killer:
    """`os`, as files.py sees it, that kills the process at one of its changes of the disk.

    Args:
        moment: How many changes happen before; the one at which it dies happens in part, or not at all.
    """

    def __init__(self, moment: int) -> None:
        self.moment = moment

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return (lambda *args: self.change(name, real, args)) if name in CHANGES else real

    def change(self, name: str, real: Any, args: tuple[Any, ...]) -> Any:
        self.moment -= 1
        if self.moment < 0:
            if name == "write":
                os.write(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)


def train(folder: str, result: str, moment: int | None, blocking: bool, in_place: bool) -> None:
    """Train from wherever the last run was, saving every other batch; write the weights at the end."""
    torch.set_num_threads(1)
    if moment is not None:
        files.os = Killer(moment)
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=not in_place, total_limit=2
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(torch.arange(64.0).view(16, 4) / 64, batch_size=2, shuffle=True)
    # Without DistributedDataParallel, which takes new processes seconds to import.
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    target = f"{folder}/only" if in_place else None
    if Path(target).is_dir() if in_place else accelerator.has_checkpoint:
        accelerator.load_state(target)
    while loader.iteration < EPOCHS:
        for index, batch in enumerate(loader):
            accelerator.backward(model(batch).square().mean())
            for parameter in model.parameters():
                parameter.grad = accelerator.reduce(parameter.grad, "mean")
            optimizer.step()
            optimizer.zero_grad()
            if index % 2:
                accelerator.save_state(target, blocking=blocking)
    accelerator.save_state(target)
    if accelerator.is_main_process:
        torch.save([p.detach() for p in model.parameters()], result)


bodies[train.__module__, "train"] = train


class Crowd:
    """Ranks that are forked for one run each."""

    def __init__(self, nursery: Nursery, world_size: int) -> None:
        self._nursery = nursery
        self._world_size = world_size

    def run(self, victim: int | None = None, **arguments: Any) -> bool:
        """Run `train` on new ranks, of which one may be killed; return whether all have come to the end."""
        ranks = self._nursery.spawn(self._world_size)
        try:
            for index, rank in enumerate(ranks):
                moment = arguments["moment"] if index == victim else None
                job = Job(train.__module__, HERE, "train", {**arguments, "moment": moment})
                rank.link.send_bytes(pickle.dumps(job))
            return self._all_end([rank.link for rank in ranks], victim)
        finally:
            for rank in ranks:  # as a launcher does once one has died
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)
                rank.link.close()

    def _all_end(self, links: list[Any], victim: int | None) -> bool:
        """Wait until all have answered, or the victim is dead, whatever the others say then."""
        answers = {index: None for index in range(len(links)) if index != victim}
        if victim is not None and not wait([links[victim]], 120):
            raise AssertionError("the victim hangs")
        if victim is not None:
            answers = {victim: None, **answers}
        for index in answers:
            try:
                answer = pickle.loads(links[index].recv_bytes())
            except (EOFError, OSError):
                assert index == victim
                return False
            assert answer.error is None, answer.error
        return True


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: only processes die here, so that no disk is needed."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    nursery: Nursery, memory: Path, world_size: int
) -> None:
    crowd, chance = Crowd(nursery, world_size), random.Random(world_size)
    assert crowd.run(folder=str(memory / "whole"), result=str(memory / "r"), moment=None, **PLAIN)
    expected = torch.load(memory / "r")
    kills = run = 0
    while kills < KILLS:
        run += 1
        how = {"blocking": chance.random() < 0.5, "in_place": chance.random() < 0.3}
        folder, result = memory / f"run{run}", memory / f"r{run}"
        while not crowd.run(
            victim=chance.randrange(world_size),
            folder=str(folder),
            result=str(result),
            moment=chance.randrange(60),
            **how,
        ):
            kills += 1
        assert all(map(torch.equal, expected, torch.load(result)))
        leftovers = [path for path in folder.rglob(".*") if path.is_dir()]
        assert not leftovers


PLAIN = {"blocking": True, "in_place": False}
