"""Run by every rank of `test_devices.py`: train and save on the device that is asked for.

The arguments are `cpu` or `accelerator`, the strategy, the precision, and an empty folder that ranks share.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from accel_train import Accelerator
from harness.engines import deepspeed_process
from train.test_async import arguments_of, check_equal

STEPS = 6
TOLERANCE = {"no": 1e-4, "bf16": 5e-2, "fp16": 2e-2}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)


def batches(device: torch.device) -> list[torch.Tensor]:
    """The same ones for every rank: gradients are those of one process whatever is sharded."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 16, generator=generator).to(device) for _ in range(STEPS)]


def plain_losses(device: torch.device) -> list[float]:
    """Plain PyTorch in float32."""
    model, optimizer = model_and_optimizer()
    model = model.to(device)
    losses: list[float] = []
    for x in batches(device):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def losses(accelerator: Accelerator) -> list[float]:
    model, optimizer = accelerator.prepare(*model_and_optimizer())
    found: list[float] = []
    for x in batches(accelerator.device):
        # DeepSpeed's engine holds its weights in the type it computes in.
        kind = next(model.parameters()).dtype
        with accelerator.autocast():
            output = model(x.to(kind))
        loss = (output.float() - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_and_save(where: str, strategy: str, precision: str, folder: str) -> None:
    """Train, compare with plain PyTorch, save and load."""
    with deepspeed_process() if strategy.startswith("zero") else nullcontext():
        options: dict[str, Any] = {**arguments_of(strategy), "mixed_precision": precision}
        accelerator = Accelerator(cpu=where == "cpu", **options)
        expected, found = plain_losses(accelerator.device), losses(accelerator)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(expected), rtol=TOLERANCE[precision], atol=TOLERANCE[precision]
        )
        assert found[-1] < found[0]
        accelerator.free_memory()
        if precision == "no" or strategy.startswith("zero"):
            check_equal(strategy, Path(folder), cpu=where == "cpu")


if __name__ == "__main__":
    train_and_save(*sys.argv[1:])
    if dist.is_initialized():
        dist.destroy_process_group()
