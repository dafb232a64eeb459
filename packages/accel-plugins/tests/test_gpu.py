"""The same on an accelerator: the public suites, one-process DDP over its backend, fused optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accel_plugins.ddp import DdpStrategy
from accel_plugins.precision import build_precision
from accel_plugins.strategy import Bundle, Strategy
from accel_plugins.testing import StrategySubject, check_strategy
from accel_state.collectives import TorchCollectives
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


def make_runtime() -> Runtime:
    return Runtime(device=torch.device(cast("Any", torch.accelerator.current_accelerator()).type, 0))


def subject(directory: Path, strategy: type[Strategy], runtime: Runtime) -> StrategySubject:
    return StrategySubject(
        make=lambda: strategy(cast("Any", None), runtime, build_precision("no", runtime.device), {}),
        runtime=runtime,
        directory=directory,
    )


def test_one_process_conforms_on_the_accelerator(tmp_path: Path):
    check_strategy(subject(tmp_path, Strategy, make_runtime()))


def test_ddp_conforms_on_the_accelerator(tmp_path: Path):
    runtime = make_runtime()
    store = dist.HashStore()
    backend = f"cpu:gloo,{runtime.device.type}:{dist.get_default_backend_for_device(runtime.device)}"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=runtime.device)
    try:
        joined = replace(runtime, collectives=TorchCollectives(runtime.device))
        check_strategy(subject(tmp_path, DdpStrategy, joined))
        strategy = DdpStrategy(cast("Any", None), joined, build_precision("no", runtime.device), {})
        wrapped = strategy.wrap(Bundle(models=[nn.Linear(1, 1)]))
        assert cast("Any", wrapped.models[0]).device_ids == [0]
    finally:
        dist.destroy_process_group()


def test_a_fused_optimizer_that_skips_inside_its_kernel_is_noticed():
    device = make_runtime().device
    policy = build_precision("fp16", device)
    model = nn.Linear(2, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = model.weight.detach().clone()
    policy.scale(model(torch.ones(1, 2, device=device)).sum() * float("inf")).backward()
    assert not policy.step(optimizer)
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    policy.scale(model(torch.ones(1, 2, device=device)).sum()).backward()
    assert policy.step(optimizer)
    assert not torch.equal(model.weight, before)
