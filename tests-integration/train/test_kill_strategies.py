"""Under every strategy: a rank is killed while it saves, and new ones go on from the checkpoint before."""

from __future__ import annotations

import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn.functional import cross_entropy

from accel_plugins import sequence_parallel_loss
from accel_plugins.kwargs import DataLoaderConfiguration, ProjectConfiguration
from accel_state import platforms
from accel_train import Accelerator
from accel_train.checkpoint import files
from distributed.equality.alone import LENGTH, ROWS, batches_of, fresh
from distributed.equality.strategies import STRATEGIES, Cell
from harness.engines import deepspeed_process
from harness.killing import Crowd, Killer, mortal
from harness.pool import shared_nursery

if TYPE_CHECKING:
    from collections.abc import Iterator

ALWAYS = {"ddp", "fsdp2+tp", "zero2"}  # replicated, sharded along two axes, an engine; the others with --all
STEPS, SAVED, KILLED = 5, 2, 4  # the last step; those after which the state is saved, and is being saved
TOLERANCE = 1e-6


class Progress:
    """Counts steps, also those before the run was killed."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def run(
    folder: str | None, arguments: dict, moment: int | None = None, *, computes_loss: bool = False
) -> tuple[int, dict]:
    """Train from wherever the last run was; return where that is, and the weights at the end."""
    config = DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=True, data_seed=3, resume_mid_epoch=True
    )
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=folder is not None)
    accelerator = Accelerator(cpu=True, project_config=project, dataloader_config=config, **arguments)
    model, optimizer = fresh()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    samples = [{"input_ids": row[:-1], "shift_labels": row[1:]} for row in batches_of(STEPS + 2)]
    loader = torch.utils.data.DataLoader(samples, batch_size=ROWS, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if folder is not None and accelerator.has_checkpoint:
        accelerator.load_state()
    begun = progress.step
    for batch in loader:
        inputs, labels = batch["input_ids"], batch["shift_labels"]
        # A loader that shards sequences says where in them the tokens are.
        positions = batch.get("position_ids", torch.arange(LENGTH).repeat(len(inputs), 1))
        parts = [inputs, labels, positions]
        with accelerator.maybe_context_parallel(parts, [1, 1, 1], {*parts}):
            if computes_loss:
                loss = model(inputs, shift_labels=labels)
            else:
                logits = model(inputs, positions).flatten(0, 1)
                loss = cross_entropy(logits, labels.flatten(), reduction="sum")
                loss = sequence_parallel_loss(loss, labels.numel())
            accelerator.backward(loss)
        optimizer.step()
        schedule.scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        if moment is not None and progress.step == KILLED:
            files.os = platforms.os = Killer(moment)  # both change the disk
        if folder is not None and progress.step in {SAVED, KILLED}:
            accelerator.save_state(flush=False)
        if progress.step == STEPS:
            break
    state = accelerator.get_state_dict(model)
    found = {name: value.detach().clone() for name, value in state.items()}
    accelerator.free_memory()
    return begun, found


@mortal
def train(strategy: str, world_size: int, folder: str, result: str, moment: int | None) -> None:
    torch.set_num_threads(1)
    cell = Cell(strategy=strategy, precision="no", accumulation=1, clip=False, world_size=world_size)
    with ExitStack() as stack:
        if strategy.startswith("zero"):
            stack.enter_context(deepspeed_process())
        stack.enter_context(warnings.catch_warnings())
        # Tensor-parallel layers return views; nothing changes them in place here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        warnings.filterwarnings("ignore", category=FutureWarning)
        row = STRATEGIES[strategy]
        begun, state = run(folder, row.arguments(cell), moment, computes_loss=row.computes_loss)
    if torch.distributed.get_rank() == 0:
        torch.save({"begun": begun, "state": state}, result)


@pytest.fixture(scope="module")
def undisturbed() -> dict:
    """What a run of one process finds that nothing disturbs."""
    return run(None, {})[1]


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is such a thing: only processes die here, so that no disk is needed."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("number", "strategy"),
    [
        pytest.param(number, name, marks=[] if name in ALWAYS else [pytest.mark.thorough], id=name)
        for number, name in enumerate(STRATEGIES)
        if name != "ep"  # which trains another model
    ],
)
def test_a_killed_run_ends_like_the_undisturbed_one(
    number: int, strategy: str, undisturbed: dict, memory: Path
) -> None:
    world_size = STRATEGIES[strategy].smallest
    crowd = Crowd(shared_nursery(), world_size)
    how = {"strategy": strategy, "world_size": world_size, "folder": str(memory / "run")}
    if STRATEGIES[strategy].recipe is not None:  # 8 bits are far from one process in float32
        alone = how | {"folder": str(memory / "alone"), "result": str(memory / "undisturbed")}
        assert crowd.run(train, moment=None, **alone)
        undisturbed = torch.load(memory / "undisturbed")["state"]
    victim, moment = number % world_size, number % 4
    assert not crowd.run(train, victim, result=str(memory / "killed"), moment=moment, **how), "it lives"
    assert not (memory / "killed").exists()
    saved = [path.name for path in (memory / "run" / "checkpoints").iterdir() if path.name[0] != "."]
    assert saved == ["checkpoint_0"]
    assert crowd.run(train, result=str(memory / "resumed"), moment=None, **how)
    found = torch.load(memory / "resumed")
    assert found["begun"] == SAVED
    assert found["state"].keys() == undisturbed.keys()
    for name, value in undisturbed.items():
        torch.testing.assert_close(found["state"][name], value, rtol=0, atol=TOLERANCE, msg=name)
