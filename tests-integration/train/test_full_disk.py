"""A disk that is really full: a small file system in memory, where the machine lets us mount one."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.kwargs import ProjectConfiguration
from accel_state.errors import CheckpointWriteError
from accel_train import Accelerator
from harness import distributed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder with room for one checkpoint of the model below, and not for two."""
    command = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(tmp_path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no right to mount a file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("blocking", [True, False])
@distributed(world_size=2)
def test_a_full_disk_is_an_error_on_all_ranks_and_the_checkpoint_before_stands(
    small: Path, blocking: bool
) -> None:
    project = ProjectConfiguration(project_dir=small, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(nn.Linear(500, 500))
    accelerator.save_state()
    before = model.module.weight.detach().clone()
    with torch.no_grad():
        model.module.weight.add_(1)
    with pytest.raises(
        CheckpointWriteError, match=r"rank 0 could not write .model.safetensors.: No space left"
    ):
        save_and_wait(accelerator, blocking)
    dist.barrier()
    assert [path.name for path in (small / "checkpoints").iterdir()] == ["checkpoint_0"]
    assert accelerator.has_checkpoint
    accelerator.load_state()
    assert torch.equal(before, model.module.weight)


def save_and_wait(accelerator: Accelerator, blocking: bool) -> None:
    saving = accelerator.save_state(blocking=blocking)
    if not blocking:
        saving.wait()
