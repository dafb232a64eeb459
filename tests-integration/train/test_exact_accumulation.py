"""Token-weighted losses of many micro-batches on many processes are those of one big batch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_plugins.kwargs import GradientAccumulationPlugin, GradScalerKwargs
from accel_state.errors import UnsupportedError
from accel_train import Accelerator
from harness import distributed

STEPS = 3
MICRO_BATCHES = 7  # per process: two windows of 3, and an incomplete one
VOCABULARY = 11
IGNORED = -100


def make_model(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 6), torch.nn.Linear(6, VOCABULARY)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def make_micro_batch(index):
    """Two sequences, of which another number of tokens counts in every micro-batch; in the 5th one, none."""
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(VOCABULARY, (2, 9), generator=generator)
    labels = torch.randint(VOCABULARY, (2, 9), generator=generator)
    kept = 0 if index == 4 else 1 + (5 * index) % 9
    labels[0, kept:] = IGNORED
    labels[1, kept // 2 :] = IGNORED
    return {"tokens": tokens, "labels": labels}


def summed_loss(model, batch):
    logits = model(batch["tokens"])
    loss = cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, (batch["labels"] != IGNORED).sum()


def solve(max_norm=None, dtype=torch.float64, world=None):
    """What plain PyTorch does with the whole window in one batch; the gradient norms, and the model."""
    world = dist.get_world_size() if world is None else world
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for start in range(0, MICRO_BATCHES, STEPS):
        rounds = range(start, min(start + STEPS, MICRO_BATCHES))
        batches = [make_micro_batch(one * world + rank) for one in rounds for rank in range(world)]
        batch = {name: torch.cat([one[name] for one in batches]) for name in ("tokens", "labels")}
        loss, items = summed_loss(model, batch)
        (loss / items).backward()
        norms.append(
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if max_norm is None else max_norm)
        )
        optimizer.step()
        optimizer.zero_grad()
    return model, torch.stack(norms)


def prepare(accelerator, dtype=torch.float64):
    model = make_model(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    everyones = range(MICRO_BATCHES * accelerator.num_processes)
    own = everyones[accelerator.process_index :: accelerator.num_processes]
    return *accelerator.prepare(model, optimizer), [*map(make_micro_batch, own)]


def assert_same(accelerator, model, right, tolerance=1e-12):
    state = accelerator.get_state_dict(model)
    for name, wanted in right.named_parameters() if state else ():  # rank 0 has it, where it is sharded
        found = state[name]
        assert torch.allclose(found.detach(), wanted.detach(), rtol=tolerance, atol=tolerance)


def train_by_hand(accelerator, model, optimizer, batches, max_norm=None):
    """Without `accumulate`: gradients stay local in all but the last micro-batch of a window."""
    norms = []
    for index, batch in enumerate(batches):
        last = (index + 1) % STEPS == 0 or index + 1 == len(batches)
        with nullcontext() if last else accelerator.no_sync(model):
            loss, items = summed_loss(model, batch)
            accelerator.backward(loss, num_items=int(items))
        if last:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf")))
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(norms)


def train_in_windows(accelerator, model, optimizer, batches, max_norm=None, *, clear_first=False):
    norms = []
    for index, batch in enumerate(batches):
        if index + 1 == len(batches):  # as the end of a prepared loader does
            accelerator.gradient_accumulation_steps = 1
        with accelerator.accumulate(model):
            if clear_first:
                optimizer.zero_grad()
            loss, items = summed_loss(model, batch)
            accelerator.backward(loss, num_items=items)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf")))
            optimizer.step()
            if not clear_first:
                optimizer.zero_grad()
    return torch.stack(norms)


def check(max_norm, train, dtype=torch.float64, tolerance=1e-12, **options):
    accelerator = Accelerator(cpu=True, **options)
    model, optimizer, batches = prepare(accelerator, dtype)
    norms = train(accelerator, model, optimizer, batches, max_norm)
    right, right_norms = solve(max_norm, dtype)
    assert_same(accelerator, model, right, tolerance)
    assert torch.allclose(norms, right_norms, rtol=tolerance)


@pytest.mark.parametrize("max_norm", [None, 0.02])
@distributed(world_size=1)
def test_one_process_equals_one_big_batch(max_norm):
    check(max_norm, train_in_windows, gradient_accumulation_steps=STEPS)


@pytest.mark.parametrize("max_norm", [None, 0.02])
@distributed(world_size=2)
def test_two_processes_equal_one_big_batch(max_norm):
    check(max_norm, train_in_windows, gradient_accumulation_steps=STEPS)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("train", ["by hand", "in windows", "clearing first"])
@distributed(world_size=2)
def test_sharded_processes_equal_one_big_batch(version, train):
    """FSDP keeps gradients that are not synchronised yet out of sight."""
    function = {
        "by hand": train_by_hand,
        "in windows": train_in_windows,
        "clearing first": partial(train_in_windows, clear_first=True),
    }[train]
    # FSDP1 computes norms in float32.
    dtype, tolerance = (torch.float32, 1e-5) if version == 1 else (torch.float64, 1e-12)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=True)
    check(0.02, function, dtype, tolerance, gradient_accumulation_steps=STEPS, fsdp_plugin=plugin)


@distributed(world_size=4)
def test_four_processes_equal_one_big_batch():
    check(0.02, train_in_windows, gradient_accumulation_steps=STEPS)


@distributed(world_size=1)
def test_one_process_without_accumulate_equals_one_big_batch():
    check(0.02, train_by_hand)


@distributed(world_size=2)
def test_two_processes_without_accumulate_equal_one_big_batch():
    check(0.02, train_by_hand)


@distributed(world_size=4)
def test_four_processes_without_accumulate_equal_one_big_batch():
    check(None, train_by_hand)


@distributed(world_size=2)
def test_gradients_may_travel_in_every_micro_batch():
    plugin = GradientAccumulationPlugin(num_steps=STEPS, sync_each_batch=True)
    check(None, train_in_windows, gradient_accumulation_plugin=plugin)


@distributed(world_size=2)
def test_the_last_incomplete_window_of_a_loader_counts_its_own_items():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    model = make_model()
    samples = [make_micro_batch(index) for index in range(MICRO_BATCHES * 2)]
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
        DataLoader(samples, batch_size=1),
    )
    for batch in loader:
        with accelerator.accumulate(model):
            flat = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
            loss, items = summed_loss(model, flat)
            accelerator.backward(loss, num_items=items)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(accelerator, model, solve()[0])


@distributed(world_size=2)
def test_gradients_are_divided_when_the_window_is_complete_and_before_anybody_looks():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1, bias=False).double()
    model = accelerator.prepare(model)
    weight = accelerator.unwrap_model(model).weight
    rank = accelerator.process_index
    one = torch.ones(1, 1, dtype=torch.float64)
    with accelerator.accumulate(model):
        accelerator.backward((1 + rank) * model(one).sum(), num_items=rank)
    with accelerator.accumulate(model):
        accelerator.backward(10 * model(one).sum(), num_items=3)
    assert weight.grad.item() == pytest.approx((1 + 2 + 10 + 10) / (0 + 1 + 3 + 3), rel=1e-15)


@distributed(world_size=2)
def test_a_scaled_loss_is_divided_as_well():
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="fp16",
        gradient_accumulation_steps=STEPS,
        kwargs_handlers=[GradScalerKwargs(init_scale=16.0)],
    )
    model, optimizer, batches = prepare(accelerator, torch.float32)
    norms = train_in_windows(accelerator, model, optimizer, batches, 0.05)
    right, right_norms = solve(0.05, torch.float32)
    assert not accelerator.optimizer_step_was_skipped
    assert_same(accelerator, model, right, tolerance=5e-3)
    assert torch.allclose(norms, right_norms, rtol=5e-3)


@distributed(world_size=2)
def test_where_processes_may_finish_early_items_cannot_be_counted():
    accelerator = Accelerator(cpu=True)
    model, _, batches = prepare(accelerator)
    loss, items = summed_loss(model, batches[0])
    with pytest.raises(UnsupportedError, match="join_uneven_inputs"), accelerator.join_uneven_inputs([model]):
        accelerator.backward(loss, num_items=items)
    accelerator.backward(loss, num_items=items)
