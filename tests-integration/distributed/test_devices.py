"""Training and saving in the background, the same program on the CPU and on accelerators."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from distributed.device_program import train_and_save
from harness import distributed

PROGRAM = Path(__file__).with_name("device_program.py")
STRATEGIES = ("single", "ddp", "fsdp2", "fsdp2-offload", "tp", "zero1", "zero2", "zero3")


def run(strategy: str, precision: str, folder: Path, ranks: int) -> None:
    command = [str(PROGRAM), "accelerator", strategy, precision, str(folder)]
    if strategy != "single":
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = ["-m", *launcher, *command]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


@distributed(world_size=2)
@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2-offload"])
def test_the_program_trains_and_saves_on_the_cpu(strategy: str, tmp_path: Path) -> None:
    train_and_save("cpu", strategy, "no", str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_program_trains_and_saves_on_accelerators(strategy: str, precision: str, tmp_path: Path) -> None:
    if strategy.startswith("zero") and precision == "no":
        pytest.skip("the state of DeepSpeed that is saved is that of a bf16 run")
    devices = torch.accelerator.device_count()
    if strategy == "tp" and devices < 2:
        pytest.skip("tensor parallelism needs two accelerators")
    run(strategy, precision, tmp_path, min(2, devices))
