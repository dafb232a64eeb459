"""The memory of one of two devices runs out, and both go on with smaller micro-batches."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from accel_ops.tree import full_tensor
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state.accelerator_state import AcceleratorState, PartialState
from accel_train import Accelerator, AutoMicroBatch
from harness import distributed

ROWS, WIDTH, SLACK = 512, 128, 65536


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch's FSDP2 cannot go on after an error"
)
@distributed(world_size=2, device="npu")
def test_one_device_is_too_small() -> None:
    free, peak, found = train(4, contextlib.nullcontext())
    assert found == 4
    rank, unlimited = PartialState().process_index, 1 << 30
    limits = (unlimited, peak + SLACK) if rank == 1 else (unlimited, unlimited)
    assert peak + SLACK < train(2, contextlib.nullcontext())[1]
    narrow, _, found = train(1, torch.npu.capacity(*limits))
    assert found == 4
    assert all(map(torch.equal, narrow, free))


def train(
    micro_batches: int, within: contextlib.AbstractContextManager[None]
) -> tuple[list[torch.Tensor], int, int]:
    """Take two steps; return the weights, the peak of memory, and into what batches were cut."""
    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()  # the model of another call
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=WIDTH * WIDTH
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    micro = AutoMicroBatch(accelerator, model, micro_batches=micro_batches)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    batches = torch.randn(2, ROWS, WIDTH, generator=generator).to(accelerator.device)
    with within:
        torch.npu.reset_peak_memory_stats()
        for batch in batches:
            micro.backward(lambda part: model(part).square().mean(), batch)
            optimizer.step()
            optimizer.zero_grad()
        peak = torch.npu.max_memory_allocated()
    return (
        [full_tensor(parameter.detach()).cpu() for parameter in model.parameters()],
        peak,
        micro.micro_batches,
    )
