"""The process group of GPUs, NCCL and gloo in one, which no CPU stands for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("group_program.py")
LEFT_TO_THE_END = """\
import torch
from accel_state import PartialState, environ, process_group, runtime

state = PartialState()
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group(**runtime._group_options(state.runtime, environ.read(), {}))
    process_group.joined()
torch.distributed.all_reduce(torch.ones(1, device=state.device))
"""


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.run([sys.executable, *launcher, *command], capture_output=True, text=True, check=False)


def check_all_collectives(mode: str, ranks: int) -> None:
    done = torchrun(ranks, str(PROGRAM), mode)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("all collectives worked") == ranks


def test_a_group_of_one_rank_serves_as_that_of_several_does() -> None:
    check_all_collectives("cpu", 1)


@pytest.mark.gpu
def test_a_group_of_nccl_and_gloo_serves_both_devices_its_subgroups_too() -> None:
    check_all_collectives("nccl", torch.accelerator.device_count())


@pytest.mark.gpu
def test_two_ranks_share_a_gpu_over_gloo() -> None:
    check_all_collectives("gloo", 2)


@pytest.mark.gpu
def test_a_program_that_leaves_its_group_to_the_end_of_the_process_ends_with_0(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(LEFT_TO_THE_END)
    done = torchrun(torch.accelerator.device_count(), str(program))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "Left the process group" not in done.stderr
