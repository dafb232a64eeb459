"""Training that is killed while it saves resumes, whatever the moment, and ends like an undisturbed run."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from accel_plugins.kwargs import DataLoaderConfiguration, ProjectConfiguration
from accel_state import platforms
from accel_train import Accelerator
from accel_train.checkpoint import files
from harness.killing import Crowd, Killer, mortal
from harness.pool import shared_nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCHS = 2


@mortal
def train(folder: str, result: str, moment: int | None, blocking: bool, in_place: bool) -> None:
    """Train from wherever the last run was, saving every other batch; write the weights at the end."""
    torch.set_num_threads(1)
    if moment is not None:
        files.os = platforms.os = Killer(moment)  # both change the disk
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=not in_place, total_limit=2
    )
    accelerator = Accelerator(
        cpu=True, project_config=project, dataloader_config=DataLoaderConfiguration(resume_mid_epoch=True)
    )
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


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: only processes die here, so that no disk is needed."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_that_is_killed_again_and_again_ends_like_an_undisturbed_one(
    memory: Path, world_size: int, kills: int
) -> None:
    crowd, chance = Crowd(shared_nursery(), world_size), random.Random(world_size)
    assert crowd.run(train, folder=str(memory / "whole"), result=str(memory / "r"), moment=None, **PLAIN)
    expected = torch.load(memory / "r")
    killed = run = 0
    while killed < kills:
        run += 1
        how = {"blocking": chance.random() < 0.5, "in_place": chance.random() < 0.3}
        folder, result = memory / f"run{run}", memory / f"r{run}"
        while not crowd.run(
            train,
            victim=chance.randrange(world_size),
            folder=str(folder),
            result=str(result),
            moment=chance.randrange(60),
            **how,
        ):
            killed += 1
        assert all(map(torch.equal, expected, torch.load(result)))
        leftovers = [path for path in folder.rglob(".*") if path.is_dir()]
        assert not leftovers


PLAIN = {"blocking": True, "in_place": False}
VALUES = 3  # the files of one state all say one number


@mortal
def overwrite(folder: str, moment: int | None, safe: bool, loads: bool) -> None:
    """Load the only checkpoint, which is of one state, and overwrite it with that of the next number."""
    accelerator = Accelerator(cpu=True)
    model, registered = nn.Linear(VALUES, 1, bias=False), nn.Linear(VALUES, 1, bias=False)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    accelerator.register_for_checkpointing(registered)
    begun, held = Path(folder) / "begun", Path(folder) / "held"
    number = float(begun.read_text())
    if loads:
        accelerator.load_state(f"{folder}/only")
        (found,) = {*model.weight.unique().tolist(), *registered.weight.unique().tolist()}
        assert float(held.read_text()) <= found <= number
        held.write_text(str(found))
    number += 1
    begun.write_text(str(number))
    with torch.no_grad():
        model.weight.fill_(number)
        registered.weight.fill_(number)
    if moment is not None:
        files.os = platforms.os = Killer(moment)  # both change the disk
    accelerator.save_state(f"{folder}/only", safe_serialization=safe)
    held.write_text(str(number))


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_checkpoint_that_is_overwritten_is_the_old_or_the_new_one_at_every_moment(
    memory: Path, step: int
) -> None:
    crowd, moment, kills = Crowd(shared_nursery(), 1), 0, 0
    (memory / "begun").write_text("0")
    crowd.run(overwrite, folder=str(memory), moment=None, safe=True, loads=False)
    dies = True
    while dies:  # at each change of the disk, until none is left
        for loads in (True, False):  # what follows a death is a load, or at once the next save
            how = {"folder": str(memory), "safe": moment % 2 == 0, "loads": loads}
            dies = not crowd.run(overwrite, victim=0, moment=moment, **how)
            kills += dies
        moment += step
    assert kills > 50 / step
    assert crowd.run(overwrite, folder=str(memory), moment=None, safe=True, loads=True)
    assert not list((memory / "only").glob(".*"))
