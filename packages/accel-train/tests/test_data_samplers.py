"""The order of an epoch depends on what it says it depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accel_train.data.samplers import SeedableRandomSampler, innermost_sampler, record_order, replay_order
from accel_train.data.shards import BatchSamplerShard


@given(
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 9),
    size=st.integers(1, 100),
    options=st.sampled_from([{}, {"replacement": True}, {"num_samples": 70}, {"num_samples": 3}]),
)
def test_an_epoch_is_that_of_a_random_sampler_seeded_with_seed_and_epoch(
    seed: int, epoch: int, size: int, options: dict[str, Any]
) -> None:
    sampler = SeedableRandomSampler(range(size), data_seed=seed, **options)
    sampler.set_epoch(epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    plain = list(RandomSampler(range(size), generator=generator, **options))
    assert list(sampler.order()) == plain
    assert list(sampler) == plain
    sampler.set_epoch(epoch)
    assert list(sampler.order().iterate_from(0, chunk=7)) == plain
    assert len(sampler) == len(plain)


def test_asking_for_an_order_does_not_touch_any_generator() -> None:
    generator = torch.Generator().manual_seed(4)
    sampler = SeedableRandomSampler(range(10), generator=generator)
    states = torch.get_rng_state(), generator.get_state()
    list(sampler)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])


def test_without_a_seed_that_of_torch_counts() -> None:
    generator = torch.Generator().manual_seed(torch.initial_seed() + 4)
    assert SeedableRandomSampler(range(3), generator=generator).initial_seed == torch.initial_seed()
    assert SeedableRandomSampler(range(3)).initial_seed == torch.initial_seed()


def test_epochs_are_counted_where_nobody_else_does() -> None:
    sampler = SeedableRandomSampler(range(8), data_seed=2)
    loader = DataLoader(list(range(8)), sampler=sampler, batch_size=None)
    passes = [[int(index) for index in loader] for _ in range(3)]
    assert sampler.epoch == 3
    for epoch, order in enumerate(passes):
        sampler.set_epoch(epoch)
        assert list(sampler.order()) == order


def test_an_iteration_that_is_left_and_a_chosen_epoch_are_not_counted() -> None:
    sampler = SeedableRandomSampler(range(8), data_seed=2)
    next(iter(sampler))
    assert sampler.epoch == 0
    for index, _ in enumerate(sampler):
        if index == 3:
            sampler.set_epoch(7)
    assert sampler.epoch == 7


def test_the_innermost_sampler_is_found_below_batch_samplers() -> None:
    sampler = SequentialSampler(())
    assert innermost_sampler(BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False))) is sampler
    assert innermost_sampler(sampler) is sampler


@pytest.mark.parametrize("state", [{"seed": 1, "epoch": 0}, {"generator": torch.Generator().get_state()}])
def test_an_order_of_another_kind_of_sampler_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="belongs to a"), replay_order(SequentialSampler(range(3)), state):
        pass


def test_an_order_that_is_not_random_needs_no_record() -> None:
    assert record_order(SequentialSampler(range(3))) == {}
