"""States that leave the device and come back: memory is freed, and training continues with the same bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.accelerator_state import AcceleratorState
from accel_train import Accelerator
from accel_train.accelerator import DistributedDataParallelKwargs
from harness import distributed

WIDTH = 256


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, WIDTH),
            nn.BatchNorm1d(WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.tp_plan = {"up": "colwise", "down": "rowwise"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


class Tall(nn.Sequential):
    """Without a norm, which tensor parallelism would have to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tp_plan = {"up": "colwise", "down": "rowwise"}


def accelerate(strategy: str) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=9
    )
    arguments: dict[str, dict[str, Any]] = {
        "single": {},
        "ddp": {},
        "ddp-views": {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
        "fsdp2": {"fsdp_plugin": plugin},
        "fsdp1": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=1)},
        "tp": {"parallelism_config": ParallelismConfig(tp_size=2)},
    }
    return Accelerator(**arguments[strategy])


def train(strategy: str, *, away: bool) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Four steps, and between them states leave the device and come back; return losses, weights, shares."""
    accelerator = accelerate(strategy)
    torch.manual_seed(0)
    model: nn.Module = Tall() if strategy.startswith("tp") else Net()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    gc.collect()  # what earlier runs left
    before_model = torch.accelerator.memory_allocated()
    model, optimizer = accelerator.prepare(model, optimizer)
    identities = [id(p) for p in model.parameters()], [id(g["params"][0]) for g in optimizer.param_groups]
    losses: list[float] = []
    shares: list[float] = []
    generator = torch.Generator().manual_seed(1 + accelerator.process_index * (not strategy.startswith("tp")))

    def leave(*include: Any) -> None:
        before = torch.accelerator.memory_allocated() - before_model
        accelerator.offload_states(include or None)
        shares.append((torch.accelerator.memory_allocated() - before_model) / before)

    for step in range(4):
        x = torch.randn(8, WIDTH, generator=generator).to(accelerator.device)
        loss = (model(x).float() - x).square().mean()
        if away and step == 1:  # an optimizer that is away during forward and backward passes
            accelerator.offload_states(["optimizer"])
        accelerator.backward(loss)
        losses.append(loss.item())
        del x, loss
        if away and step in {1, 2}:  # gradients are there
            leave()
            accelerator.reload_states(["gradients"])
            accelerator.reload_states()
        optimizer.step()
        if away and step == 3:
            leave("gradients", "optimizer")
            leave("parameters")
            accelerator.reload_states()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model(torch.ones(2, WIDTH, device=accelerator.device))
            if away:  # FSDP may keep a buffer of one unit, which is half of this model
                accelerator.offload_states()
                accelerator.reload_states()
    assert identities == (
        [id(p) for p in model.parameters()],
        [id(g["params"][0]) for g in optimizer.param_groups],
    )
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    return losses, weights, shares


def check(strategy: str) -> None:
    losses, weights, _ = train(strategy, away=False)
    found, weights_found, shares = train(strategy, away=True)
    assert found == losses
    assert weights_found.keys() == weights.keys()
    assert all(torch.equal(weights_found[name], weights[name]) for name in weights)
    everything = [share for index, share in enumerate(shares) if index != 2]  # the third left parameters
    assert max(everything) <= 0.05, shares


@distributed(world_size=1, device="npu")
def test_one_process() -> None:
    check("single")


@pytest.mark.parametrize("strategy", ["ddp", "ddp-views", "fsdp2", "fsdp1", "tp"])
@distributed(world_size=2, device="npu")
def test_two_ranks(strategy: str) -> None:
    check(strategy)
