"""The order of an epoch depends on what it says it depends on."""

from __future__ import annotations

import random
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from accel_train.data import samplers
from accel_train.data.prepare import prepare_data_loader
from accel_train.data.samplers import (
    SeedableRandomSampler,
    innermost_sampler,
    permute,
    record_order,
    replay_order,
)
from accel_train.data.shards import BatchSamplerShard, Draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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
    assert list(sampler) == plain
    sampler.set_epoch(epoch)
    assert list(sampler.iterate_from(0)) == plain
    assert list(sampler.iterate_from(size // 2)) == plain[size // 2 :]
    assert len(sampler) == len(plain)


@given(size=st.integers(1, 3000), key=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=2))
def test_a_keyed_order_has_every_item_once_wherever_it_is_read(size: int, key: list[int]) -> None:
    order = permute(np.arange(size), size, key)
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(permute(np.arange(size)[size // 2 :], size, key), order[size // 2 :])


@pytest.mark.parametrize("size", [24, 64, 100])
def test_keyed_orders_are_uniform(size: int) -> None:
    orders = np.stack([permute(np.arange(size), size, [seed, 0]) for seed in range(60 * size)])
    steps = (orders[:, 1:2] - orders[:, :1]).astype(np.int64) % size  # between two neighbours: 1 to size - 1
    for drawn, values in ((orders[:, 0], size), (orders[:, size // 2], size), (steps.ravel() - 1, size - 1)):
        expected = len(drawn) / values
        chi_square = (
            (np.bincount(drawn.astype(np.int64), minlength=values) - expected) ** 2 / expected
        ).sum()
        degrees = values - 1
        assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5


def test_few_items_come_in_all_their_orders_alike_often() -> None:
    orders = [tuple(permute(np.arange(4), 4, [seed]).tolist()) for seed in range(4800)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24
    assert ((counts - 200) ** 2 / 200).sum() < 23 + 4 * 46**0.5


@pytest.mark.parametrize("ranks", [1, 2, 8192])
def test_a_billion_samples_are_read_from_any_position_on(ranks: int) -> None:
    size = 10**9

    def batches(index: int, start: int) -> list[list[int]]:
        plain: Any = BatchSampler(SeedableRandomSampler(range(size), data_seed=3), 4, drop_last=False)
        shard = BatchSamplerShard(plain, num_processes=ranks, process_index=index)
        drawn = next(iter(shard.iterate(Draw(start=start))))
        return [next(drawn), next(drawn)]

    start, last = 900_000_000, ranks - 1
    order = SeedableRandomSampler(range(size), data_seed=3).iterate_from(start + 4 * last)
    expected = list(islice(order, 4 * ranks + 4))
    assert batches(last, start) == [expected[:4], expected[4 * ranks :]]


def test_a_keyed_order_continues_in_laps_and_changes_with_the_epoch(monkeypatch) -> None:
    monkeypatch.setattr(samplers, "KEYED_FROM", 10)
    monkeypatch.setattr(samplers, "_CHUNK", 3)
    sampler = SeedableRandomSampler(range(10), data_seed=-5, num_samples=25)
    first, second = list(sampler), list(sampler)
    assert first != second
    assert [sorted(first[:10]), sorted(first[10:20])] == [list(range(10))] * 2
    assert first[:10] != first[10:20]
    sampler.set_epoch(0)
    assert [list(sampler.iterate_from(position)) for position in range(26)] == [first[i:] for i in range(26)]
    below: Any = RandomSampler(range(9))
    loader = prepare_data_loader(DataLoader(range(9), sampler=below))
    assert innermost_sampler(loader.batch_sampler) is below


def test_the_generator_of_a_sampler_of_many_seeds_its_order(monkeypatch) -> None:
    monkeypatch.setattr(samplers, "KEYED_FROM", 10)

    def order(seed: int) -> list[int]:
        sampler = RandomSampler(range(10), generator=torch.Generator().manual_seed(seed))
        return [int(item) for item in prepare_data_loader(DataLoader(range(10), sampler=sampler))]

    assert order(1) == order(1) != order(2)


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_a_position_in_an_order_of_torch_is_refused_where_the_order_is_keyed(monkeypatch, generator) -> None:
    """As by a run that was saved before orders of many samples were keyed."""

    def loader() -> Any:
        sampler = RandomSampler(range(10), generator=generator)
        return prepare_data_loader(DataLoader(range(10), sampler=sampler, batch_size=2))

    saved = loader()
    batches = iter(saved)
    next(batches)
    state = saved.state_dict()
    monkeypatch.setattr(samplers, "KEYED_FROM", 10)
    other = loader()
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="belongs to a sampler with a"):
        next(iter(other))


def test_a_seed_for_a_keyed_order_has_an_effect(monkeypatch, caplog) -> None:
    monkeypatch.setattr(samplers, "KEYED_FROM", 10)
    first, other = (
        [int(item) for item in prepare_data_loader(DataLoader(range(10), shuffle=True), data_seed=seed)]
        for seed in (1, 2)
    )
    assert first != other
    assert "data_seed" not in caplog.text
    prepare_data_loader(DataLoader(range(9), shuffle=True), data_seed=1)
    assert "data_seed has no effect" in caplog.text


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
        assert list(sampler.iterate_from(0)) == order


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


class Drawing(Sampler[int]):
    """Shuffles buckets with a function, each when it is reached."""

    def __init__(self, shuffled: Callable[[list[int]], list[int]]) -> None:
        self.shuffled = shuffled

    def __len__(self) -> int:
        return 36

    def __iter__(self) -> Iterator[int]:
        for first in (0, 12, 24):
            yield from self.shuffled(list(range(first, first + 12)))


class DrawnBatches(BatchSampler):
    """Shuffles batches."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(list(super().__iter__()), len(self)))


DRAWING: dict[str, Callable[[], dict[str, Any]]] = {
    "random": lambda: {"sampler": Drawing(lambda items: random.sample(items, len(items))), "batch_size": 3},
    "numpy": lambda: {
        "sampler": Drawing(lambda items: np.random.permutation(items).tolist()),
        "batch_size": 3,
    },
    "torch": lambda: {
        "sampler": Drawing(lambda items: [items[i] for i in torch.randperm(len(items)).tolist()]),
        "batch_size": 3,
    },
    "batches": lambda: {"batch_sampler": DrawnBatches(SequentialSampler(range(36)), 3, drop_last=False)},
    "batches of a sampler that shuffles": lambda: {
        "batch_sampler": DrawnBatches(
            RandomSampler(range(36), generator=torch.Generator()), 3, drop_last=False
        )
    },
}


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("kind", DRAWING)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sampler_that_draws_from_global_generators_has_one_order_on_all_ranks(
    kind: str, workers: int
) -> None:
    def loaders(seed: int) -> list[Any]:
        prepared = []
        for rank in (0, 1):
            seed_all(seed)  # as if rank 0 had sent its numbers
            plain = DataLoader(range(36), num_workers=workers, **DRAWING[kind]())
            options: dict[str, Any] = {"num_processes": 2, "process_index": rank}
            prepared.append(prepare_data_loader(plain, **options))
        return prepared

    ranks = loaders(1)
    epochs = []
    for _ in range(2):
        passes = []
        for rank, loader in enumerate(ranks):
            seed_all(10 + rank)
            batches = []
            for batch in loader:
                batches.append(batch.tolist())
                torch.rand(rank)  # ranks draw different numbers while they train
                random.random()
            passes.append(batches)
        epochs.append(passes)
        assert sorted(i for batches in passes for batch in batches for i in batch) == list(range(36))
    assert epochs[0] != epochs[1]
    for rank, loader in enumerate(loaders(1)):
        next(batches := iter(loader))
        state = loader.state_dict()
        batches.close()
        resumed = loaders(2)[rank]
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == epochs[0][rank][1:]


def test_reading_such_a_sampler_draws_nothing_from_the_global_generators() -> None:
    plain = DataLoader(range(36), **DRAWING["random"]())
    loader = prepare_data_loader(plain, num_processes=2, process_index=0)
    seed_all(3)
    batches = iter(loader)
    next(batches)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    seed_all(3)
    torch.empty((), dtype=torch.int64).random_()  # the seed of workers, as torch's loader draws it
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_subclass_with_an_order_of_its_own_resumes_in_that_order() -> None:
    class Reversed(SeedableRandomSampler):
        def __iter__(self) -> Iterator[int]:
            return reversed(list(super().__iter__()))

    sampler = Reversed(range(8), data_seed=1)
    shard = BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), 1, 0)
    whole = list(shard)
    sampler.set_epoch(0)
    assert [*chain.from_iterable(shard.iterate(Draw(4)))] == whole[2:]
