"""Batches by a budget of tokens on two ranks: steps are those of one large batch, and ranks have as many."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_train import Accelerator, TokenBudgetBatchSampler
from harness import distributed

BUDGET, STEPS = 40, 3


def long_tailed():
    """Rows of tokens of very different lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.empty(90).log_normal_(1.5, 1.0, generator=generator).long().clamp(1, BUDGET)
    return [torch.randint(11, (int(length),), generator=generator) for length in lengths]


def loss_of(model, rows, reduction):
    """The loss of rows, each of which is to be predicted from its end."""
    labels = torch.cat([row.flip(0) for row in rows])
    return functional.cross_entropy(model(torch.cat(rows)), labels, reduction=reduction)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@distributed(world_size=2)
def test_each_step_is_that_of_one_large_batch(strategy):
    torch.manual_seed(0)
    rows = long_tailed()
    plain = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if strategy == "fsdp2" else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=STEPS)
    model = copy.deepcopy(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sampler = TokenBudgetBatchSampler([*map(len, rows)], BUDGET, multiple_of=2 * STEPS)
    loader = DataLoader(range(len(rows)), batch_sampler=sampler, collate_fn=list)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    steps, in_window = 0, []
    for batch in loader:
        in_window += batch
        own = [rows[index] for index in batch]
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, own, "sum"), num_items=sum(map(len, own)))
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            of_ranks = [None, None]
            dist.all_gather_object(of_ranks, in_window)
            reference.zero_grad()
            loss_of(plain, [rows[index] for part in of_ranks for index in part], "mean").backward()
            reference.step()
            steps, in_window = steps + 1, []
            state = accelerator.get_state_dict(model)
            for name, value in state.items():
                torch.testing.assert_close(value, plain.state_dict()[name])
    assert steps == len(sampler) / (2 * STEPS)
