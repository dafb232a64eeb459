"""Several processes that train together end with the weights of one that sees the same global batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, cycle, islice

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accel_train import Accelerator
from harness import distributed

EPOCHS = 2
BATCH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train: `batch` samples per process, of `samples` in the data set."""

    samples: int
    accumulation: int = 1
    split: bool = False
    clip: bool = False
    dispatch: bool | None = None


CASES = {
    "whole rounds": Case(samples=48),
    "uneven last batch": Case(samples=41),
    "fewer samples than processes": Case(samples=2),
    "accumulation": Case(samples=48, accumulation=2),
    "accumulation, uneven last batch": Case(samples=41, accumulation=3),
    "split batches": Case(samples=48, split=True),
    "split batches, uneven last batch": Case(samples=41, split=True, accumulation=2),
    "clipping": Case(samples=41, clip=True, accumulation=2),
    "dispatched": Case(samples=41, dispatch=True, accumulation=2),
}


def make_data(case):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(case.samples, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(case.samples, 1, generator=generator, dtype=torch.float64)
    return inputs, targets


def make_model():
    generator = torch.Generator().manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def make_optimizer(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))


def global_batches(case, world_size):
    """An epoch is filled up with its first samples; where one process reads, the last round with its own."""
    rows = BATCH * world_size
    rounds = [list(range(first, min(first + rows, case.samples))) for first in range(0, case.samples, rows)]
    last = rounds.pop()
    if case.dispatch:
        return [*rounds, list(islice(cycle(last), -(-len(last) // world_size) * world_size))]
    return [*rounds, list(islice(chain(last, cycle(range(case.samples))), rows))]


def plainly(case, world_size):
    """One process, plain PyTorch, global batches."""
    inputs, targets = make_data(case)
    model = make_model()
    optimizer, scheduler = make_optimizer(model)
    batches = global_batches(case, world_size)
    for _ in range(EPOCHS):
        for first in range(0, len(batches), case.accumulation):
            for chosen in batches[first : first + case.accumulation]:
                (mse_loss(model(inputs[chosen]), targets[chosen]) / case.accumulation).backward()
            if case.clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            for _ in range(1 if case.split else world_size):
                scheduler.step()
            optimizer.zero_grad()
    return model, scheduler


def together(case, world_size):
    """The same through `Accelerator`."""
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=case.accumulation, split_batches=case.split
    )
    accelerator.dataloader_config.dispatch_batches = case.dispatch
    model = make_model()
    optimizer, scheduler = make_optimizer(model)
    loader = DataLoader(TensorDataset(*make_data(case)), batch_size=BATCH * (world_size if case.split else 1))
    scheduler, model, loader, optimizer = accelerator.prepare(scheduler, model, loader, optimizer)
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                if case.clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model), scheduler.scheduler


def check(case):
    world_size = dist.get_world_size()
    expected, expected_schedule = plainly(case, world_size)
    found, schedule = together(case, world_size)
    for (name, wanted), parameter in zip(expected.named_parameters(), found.parameters(), strict=True):
        assert (wanted - parameter).abs().max() < 1e-10, name
    start = make_model()
    assert all(
        (a - b).abs().max() > 1e-3 for a, b in zip(start.parameters(), found.parameters(), strict=True)
    )
    assert schedule.last_epoch == expected_schedule.last_epoch


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@distributed(world_size=2)
def test_two_processes_train_as_one(case):
    check(case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@distributed(world_size=4)
def test_four_processes_train_as_one(case):
    check(case)


@distributed(world_size=2)
def test_a_batch_without_partner_counts_as_zero_when_uneven_inputs_are_joined():
    """Three batches on rank 0, two on rank 1: the last gradient is half of rank 0's."""
    inputs, targets = make_data(Case(samples=5 * BATCH))
    expected = make_model()
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for number in range(0, 5, 2):
        for batch in range(number, min(number + 2, 5)):
            chosen = slice(batch * BATCH, (batch + 1) * BATCH)
            (mse_loss(expected(inputs[chosen]), targets[chosen]) / 2).backward()
        plain.step()
        plain.zero_grad()

    accelerator = Accelerator(cpu=True)
    model = make_model()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        DataLoader(TensorDataset(inputs, targets), batch_size=BATCH),
    )
    counted = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for batch, wanted in loader:
            accelerator.backward(mse_loss(model(batch), wanted))
            optimizer.step()
            optimizer.zero_grad()
            counted += 1
    assert counted == (3 if accelerator.is_main_process else 2)
    assert len(list(loader)) == 3, "even batches are back after the context"
    assert accelerator.even_batches
    # Rank 1 has left off one step earlier and got the final weights from rank 0 on leaving.
    for wanted, parameter in zip(expected.parameters(), model.parameters(), strict=True):
        assert (wanted - parameter).abs().max() < 1e-10
