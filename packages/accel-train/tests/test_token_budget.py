"""Batches by a budget of tokens: each sample once, within the budget, balanced, resumed exactly."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accel_train import TokenBudgetBatchSampler, prepare_data_loader

BUDGET = 100


def long_tailed(samples=3000):
    """Lengths of a log-normal distribution, cut to the budget."""
    lengths = torch.empty(samples).log_normal_(2.0, 1.0, generator=torch.Generator().manual_seed(0))
    return lengths.long().clamp(1, BUDGET).tolist()


def loader_of(lengths, ranks=1, rank=0, **options):
    sampler = TokenBudgetBatchSampler(lengths, BUDGET, **options)
    loader = DataLoader(range(len(lengths)), batch_sampler=sampler, collate_fn=list)
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank)


def rounds_of(batches, size):
    return [batches[start : start + size] for start in range(0, len(batches), size)]


def idle_share(rounds, cost):
    """The share of their time for which ranks wait for the slowest one."""
    costs = torch.tensor([[sum(map(cost, batch)) for batch in batches] for batches in rounds]).double()
    return 1 - float(costs.sum() / (costs.amax(1).sum() * costs.shape[1]))


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, BUDGET), min_size=1, max_size=120),
    size=st.integers(1, 7),
    shuffle=st.booleans(),
    squared=st.booleans(),
)
def test_each_sample_is_in_one_batch_within_the_budget(lengths, size, shuffle, squared):
    cost = (lambda length: length**2) if squared else None
    sampler = TokenBudgetBatchSampler(lengths, BUDGET, multiple_of=size, shuffle=shuffle, cost=cost)
    count, batches = len(sampler), list(sampler)
    assert len(batches) == count
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(batch and sum(lengths[index] for index in batch) <= BUDGET for batch in batches)
    incomplete = len(batches) % size
    # A round is incomplete only if each of its samples is a batch of its own.
    assert all(len(batch) == 1 for batch in batches[len(batches) - incomplete :])


@pytest.mark.parametrize("power", [1, 2])
def test_rounds_are_balanced_and_batches_are_full(power):
    lengths, ranks = long_tailed(), 8
    sampler = TokenBudgetBatchSampler(lengths, BUDGET, multiple_of=ranks, cost=lambda length: length**power)
    rounds = rounds_of([[lengths[index] for index in batch] for batch in sampler], ranks)
    order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).tolist()
    fixed = rounds_of(rounds_of([lengths[index] for index in order], 8), ranks)[:-1]
    before, after = (idle_share(some, lambda length: length**power) for some in (fixed, rounds))
    assert after < before / 4
    tokens = [sum(batch) for batches in rounds[:-8] for batch in batches]
    assert sum(tokens) > 0.97 * BUDGET * len(tokens)


def test_epochs_have_other_orders_that_only_the_seed_determines():
    lengths = long_tailed(300)
    sampler, again = (TokenBudgetBatchSampler(lengths, BUDGET, multiple_of=2, seed=3) for _ in range(2))
    first, second = list(sampler), list(sampler)
    assert first != second
    assert first == list(again)
    again.sampler.set_epoch(1)
    assert second == list(again)


def test_ranks_share_the_batches_and_have_as_many():
    lengths = long_tailed(500)
    everything = [list(loader_of(lengths, ranks=4, rank=rank, multiple_of=4)) for rank in range(4)]
    assert len({len(batches) for batches in everything}) == 1
    samples = [index for batches in everything for batch in batches for index in batch]
    assert sorted(samples) == list(range(len(lengths)))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("later", [1, 2, 4])
def test_any_number_of_ranks_continues_with_the_same_samples(epoch, later):
    lengths = long_tailed(500)
    whole = loader_of(lengths, multiple_of=4)
    for _ in range(epoch):
        list(whole)
    expected = [index for batch in whole for index in batch]
    seen, saved = [], None
    for rank in range(2):
        loader = loader_of(lengths, ranks=2, rank=rank, multiple_of=4)
        for _ in range(epoch):
            list(loader)
        for number, batch in enumerate(loader):
            seen += batch
            if number == 5:
                saved = json.loads(json.dumps(loader.state_dict(), default=lambda value: value.tolist()))
                break
    for rank in range(later):
        loader = loader_of(lengths, ranks=later, rank=rank, multiple_of=4)
        loader.load_state_dict(saved)
        seen += [index for batch in loader for index in batch]
        following = [index for batch in loader for index in batch]
        assert following
    assert sorted(seen) == sorted(expected)


def test_an_incomplete_last_round_is_dropped_on_request():
    lengths = [BUDGET] * 7
    assert len(list(TokenBudgetBatchSampler(lengths, BUDGET, multiple_of=4))) == 7
    dropping = TokenBudgetBatchSampler(lengths, BUDGET, multiple_of=4, drop_last=True)
    assert len(dropping) == len(list(dropping)) == 4


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([3, 101], {}, r"sample 1 has 101 tokens, and a batch has 1 to max_tokens=100"),
        ([3, 0], {}, r"sample 1 has 0 tokens"),
        ([3], {"multiple_of": 0}, r"multiple_of=0"),
    ],
)
def test_what_cannot_be_batched_is_named(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetBatchSampler(lengths, BUDGET, **options)
