from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from accel_inspect.estimate.memory import TrainingSetup, estimate
from accel_inspect.estimate.meta_model import sizes_of
from accel_inspect.estimate.trace import moments_of

WIDTH = 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.back = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        queries, keys, values = self.mix(self.norm(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + nn.functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
        return x + self.back(nn.functional.gelu(self.wide(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(WIDTH, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def passes(batch, length):
    def run(model):
        ids = torch.ones(batch, length, dtype=torch.int64)
        output = model(ids)
        return nn.functional.cross_entropy(output.flatten(0, 1), ids.flatten()), output

    return run


def measured(batch, length, dtype):
    """Return the peak of allocated bytes in three steps of training."""
    gc.collect()  # or what is freed later would be taken from what is measured
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)  # as on an accelerator
        for _ in range(3):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                held = passes(batch, length)(model)
            held[0].backward()
            del held
            optimizer.step()
            optimizer.zero_grad()
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize(("batch", "length"), [(1, 16), (8, 96)])
def test_the_estimate_of_one_process_is_within_a_tenth_of_what_is_measured(batch, length, dtype):
    with torch.device("meta"):
        model = Net()
        model.head.weight = model.embed.weight
    moments = moments_of(model, passes(batch, length), dtype=dtype)
    setup = TrainingSetup(sizes=sizes_of(model), width=4 if dtype is None else 2, moments=moments)
    assert estimate("one device", setup).device == pytest.approx(measured(batch, length, dtype), rel=0.1)


def test_following_the_passes_leaves_the_model_as_it_was():
    model = Net()
    before = dict(model.named_parameters())
    moments_of(model, passes(1, 4))
    after = dict(model.named_parameters())
    assert [name for name in before if before[name] is not after[name]] == []
    assert [name for name, parameter in after.items() if parameter.grad is not None] == []
    assert model.head.weight is model.embed.weight


def test_all_gradients_are_seen_once_also_that_of_a_tied_weight():
    model = Net()
    moments = moments_of(model, passes(1, 4))
    assert max(moment.gradients for moment in moments) == sum(map(torch.numel, model.parameters()))


def test_weights_that_are_frozen_get_no_gradient_and_no_moments():
    model = Net()
    model.embed.requires_grad_(False)
    sizes = sizes_of(model)
    frozen = model.embed.weight.numel()
    assert sizes.parameters - sizes.trainable == frozen
    assert max(moment.gradients for moment in moments_of(model, passes(1, 4))) == sizes.trainable
