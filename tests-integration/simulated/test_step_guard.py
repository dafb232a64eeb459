"""A step guard lets the host run ahead: it waits for no work of the step that it has just submitted."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import StepGuard
from accel_train import Accelerator
from harness import distributed


@pytest.mark.parametrize(("fused", "version"), [(True, None), (True, 2), (False, None)])
@distributed(world_size=2, device="npu")
def test_the_host_waits_for_earlier_steps_alone(fused: bool, version: int | None) -> None:
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(kwargs_handlers=[StepGuard()], fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused, foreach=not fused)
    )
    good = torch.randn(2, 4, device=accelerator.device)
    bad = good.clone()
    bad[0] = torch.nan if accelerator.is_main_process else 0

    def step(inputs: torch.Tensor) -> bool | torch.Tensor:
        accelerator.backward(mse_loss(model(inputs), good))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer._stepped

    for _ in range(2):  # DDP sorts its buckets in the second
        step(good)
    with torch.npu.counting() as counted:
        stepped = [step(inputs) for inputs in (good, bad, good)]
    waits = dict(counted.synchronisations)
    assert waits.pop("event", 0) <= 3  # for the step before, at each step
    assert waits == ({} if fused else {"item": 3})
    assert [bool(flag) for flag in stepped] == [True, False, True]
    assert all(weight.isfinite().all() for weight in model.parameters())
