"""Every sample of a batch sampler or stream goes to one rank, whatever is split, padded or dropped."""

from __future__ import annotations

from copy import copy
from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from accel_train.data.samplers import SeedableRandomSampler
from accel_train.data.shards import BatchSamplerShard, BatchWithMeta, Draw, IterableDatasetShard, MetaCollate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Reversed(Sampler[int]):
    """A sampler that nobody knows, whose order is known only by iterating."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class Batches:
    """A batch sampler that is not torch's."""

    def __init__(self, batches: list[list[int]], batch_size: int | None = None) -> None:
        self.batches = batches
        if batch_size is not None:
            self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def batches_of(shard: BatchSamplerShard, draw: Draw) -> Iterator[list[int]]:
    return chain.from_iterable(shard.iterate(draw))


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "sequential": lambda size: SequentialSampler(range(size)),
    "unknown": Reversed,
    "seeded": lambda size: SeedableRandomSampler(range(size), data_seed=3) if size else SequentialSampler(()),
    "list": lambda size: list(range(size)),
}


def expected(
    order: list[int], size: int, world: int, *, drop: bool, split: bool, even: bool, static: bool = False
) -> list[list[list[int]]]:
    """Shard by brute force: cut the order into rounds, complete the last one, split each across ranks."""
    rows = size // world if split else size
    stride = rows * world
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    for begin in range(0, len(order), stride):
        turn = order[begin : begin + stride]
        if len(turn) < stride and drop:
            break
        if even and (world > 1 or static):
            turn = turn + list(islice(cycle(order), stride - len(turn)))
        for rank in range(world):
            if share := turn[rank * rows : (rank + 1) * rows]:
                shares[rank].append(share)
    return shares


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.integers(1, 5))
    split = draw(st.booleans())
    size = world * draw(st.integers(1, 3)) if split else draw(st.integers(1, 5))
    return {
        "total": draw(st.integers(0, 40)),
        "size": size,
        "world": world,
        "split": split,
        "even": draw(st.booleans()),
        "drop": draw(st.booleans()),
        "static": draw(st.booleans()),
        "kind": draw(st.sampled_from(sorted(SAMPLERS))),
    }


def shards(case: dict[str, Any], world: int | None = None) -> list[BatchSamplerShard]:
    world = world or case["world"]
    return [
        BatchSamplerShard(
            BatchSampler(SAMPLERS[case["kind"]](case["total"]), case["size"], case["drop"]),
            world,
            rank,
            case["split"],
            case["even"],
            static_shapes=case["static"],
        )
        for rank in range(world)
    ]


@given(case=cases())
def test_ranks_get_what_brute_force_gives_them(case: dict[str, Any]) -> None:
    order = list(SAMPLERS[case["kind"]](case["total"]))
    options = {name: case[name] for name in ("drop", "split", "even", "static")}
    shares = expected(order, case["size"], case["world"], **options)
    for shard, share in zip(shards(case), shares, strict=True):
        assert list(shard) == share
        assert len(shard) == len(share)


@given(case=cases())
def test_what_is_not_padding_is_every_sample_once(case: dict[str, Any]) -> None:
    seen: list[int] = []
    padded = 0
    parts = shards(case)
    for shard in parts:
        draw = Draw()
        for number, batch in enumerate(list(batches_of(shard, draw))):
            real = draw.padded.get(number, len(batch))
            seen += batch[:real]
            padded += len(batch) - real
    stride = parts[0].plan.stride
    kept = case["total"] - (case["total"] % stride if case["drop"] else 0)
    order = list(SAMPLERS[case["kind"]](case["total"]))
    assert sorted(seen) == sorted(order[:kept])
    completes = case["even"] and (case["world"] > 1 or case["static"]) and not case["drop"]
    assert padded == (-case["total"] % stride if completes else 0)


@given(
    case=cases(),
    rounds=st.lists(st.integers(0, 4), min_size=3, max_size=3),
    worlds=st.permutations([1, 2, 3]),
)
def test_an_epoch_continued_by_other_numbers_of_ranks_is_seen_once(
    case: dict[str, Any], rounds: list[int], worlds: list[int]
) -> None:
    case = {**case, "drop": False, "split": False}
    seen: list[int] = []
    position = 0
    for stage, world in enumerate(worlds):
        parts = shards(case, world)
        steps = rounds[stage] if stage < 2 else None
        for shard in parts:
            draw = Draw(position)
            batches = list(batches_of(shard, draw))
            assert position or len(batches) == len(shard)
            for number, batch in enumerate(batches[:steps]):
                seen += batch[: draw.padded.get(number, len(batch))]
        position += (steps or 0) * parts[0].plan.stride
    assert sorted(seen) == list(range(case["total"]))


@given(case=cases(), rounds=st.integers(0, 5))
def test_continuing_gives_exactly_the_batches_that_were_left(case: dict[str, Any], rounds: int) -> None:
    for shard in shards(case):
        whole = list(shard)
        if isinstance(shard.sampler, SeedableRandomSampler):
            shard.sampler.set_epoch(0)
        assert list(batches_of(shard, Draw(rounds * shard.plan.stride))) == whole[rounds:]


@given(
    lengths=st.lists(st.integers(1, 4), max_size=9),
    world=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    rounds=st.integers(0, 3),
)
def test_batches_of_any_length_are_dealt_once_and_evenly(
    lengths: list[int], world: int, split: bool, even: bool, rounds: int
) -> None:
    numbers = iter(range(100))
    batches = [list(islice(numbers, length)) for length in lengths]
    seen: list[int] = []
    counts: list[int] = []
    for rank in range(world):
        shard = BatchSamplerShard(Batches(batches, 4 * world if split else 4), world, rank, split, even)
        draw = Draw()
        batches_of_rank = list(batches_of(shard, draw))
        counts.append(len(batches_of_rank))
        for number, batch in enumerate(batches_of_rank):
            seen += batch[: draw.padded.get(number, len(batch))]
        if even:
            assert len(shard) == len(batches_of_rank)
            assert list(batches_of(shard, Draw(rounds * shard.plan.stride))) == batches_of_rank[rounds:]
    assert sorted(seen) == list(chain.from_iterable(batches))
    if even:
        assert len(set(counts)) == 1


def test_batches_without_a_size_are_dealt_whole() -> None:
    batches = [[0], [1, 2, 3], [4, 5], [6]]
    shares = [list(BatchSamplerShard(Batches(batches), 3, rank, even_batches=False)) for rank in range(3)]
    assert shares == [[[0], [6]], [[1, 2, 3]], [[4, 5]]]


@pytest.mark.parametrize(
    ("batches", "world", "shares", "real"),
    [
        ([[0], [1, 2], [3, 4, 5]], 2, [[[0], [3, 4, 5]], [[1, 2], [0]]], [{}, {1: 0}]),
        ([[0, 1]], 3, [[[0, 1]], [[0, 1]], [[0, 1]]], [{}, {0: 0}, {0: 0}]),
        ([[0], [1]], 4, [[[0]], [[1]], [[0]], [[1]]], [{}, {}, {0: 0}, {0: 0}]),
    ],
)
def test_batches_without_a_size_are_made_even_with_the_first_ones(
    batches: list[list[int]], world: int, shares: list[Any], real: list[dict[int, int]]
) -> None:
    shards = [BatchSamplerShard(Batches(batches), world, rank) for rank in range(world)]
    draws = [Draw() for _ in shards]
    assert [list(batches_of(shard, draw)) for shard, draw in zip(shards, draws, strict=True)] == shares
    assert [draw.padded for draw in draws] == real
    assert {len(shard) for shard in shards} == {len(shares[0])}


@pytest.mark.parametrize("world", [1, 2])
def test_batches_without_a_size_cannot_be_split(world: int) -> None:
    with pytest.raises(ValueError, match="batch_size=None is not a round multiple"):
        BatchSamplerShard(Batches([[0, 1, 2, 3], [4]]), world, 0, split_batches=True)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("is_set_on_the_shard", [False, True])
def test_a_batch_size_that_is_set_later_is_followed(
    split: bool, world: int, is_set_on_the_shard: bool
) -> None:
    shares = expected(list(range(11)), 4, world, drop=False, split=split, even=True)
    for rank in range(world):
        batches = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
        shard = BatchSamplerShard(batches, world, rank, split)
        assert len(list(shard)) == (6 if split or world == 1 else 3)
        (shard if is_set_on_the_shard else batches).batch_size = 4
        assert list(shard) == shares[rank]
        assert len(shard) == len(shares[rank])
        assert shard.batch_size == 4
        batches.drop_last = True
        assert list(shard) == expected(list(range(11)), 4, world, drop=True, split=split, even=True)[rank]


def test_a_shard_of_a_seeded_order_goes_on_to_the_next_epoch() -> None:
    sampler = SeedableRandomSampler(range(6), data_seed=3)
    shard = BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), 2, 0)
    first, second = list(shard), list(shard)
    assert sampler.epoch == 2
    sampler.set_epoch(0)
    assert (list(shard), list(shard)) == (first, second)
    assert first != second


def test_a_batch_that_does_not_divide_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="batch_size=4 is not a round multiple of num_processes=3"):
        BatchSamplerShard(BatchSampler(range(8), 4, drop_last=False), 3, 0, split_batches=True)


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="process_index=2"):
        BatchSamplerShard(BatchSampler(range(8), 4, drop_last=False), 2, 2)


@pytest.mark.parametrize("seeded", [True, False])
def test_a_random_order_is_replayed(seeded: bool) -> None:
    generator = torch.Generator().manual_seed(5) if seeded else None
    shard = BatchSamplerShard(BatchSampler(RandomSampler(range(20), generator=generator), 3, drop_last=False))
    draw = Draw()
    whole = list(batches_of(shard, draw))
    following = list(shard)
    assert following != whole

    if generator is not None:
        generator.manual_seed(99)
    else:
        torch.manual_seed(99)
    before = torch.get_rng_state()
    assert list(batches_of(shard, Draw(6, draw.order))) == whole[2:]
    assert torch.equal(torch.get_rng_state(), before)
    if generator is not None:
        assert list(shard) == following


class Count(IterableDataset[int]):
    """The numbers up to a size, which says how many of them were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            self.read += 1
            yield number


class Seekable(Count):
    def iterate_from(self, position: int) -> Iterator[int]:
        for number in range(position, self.size):
            self.read += 1
            yield number


class Shuffled(IterableDataset[int]):
    """Draws its order from its generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(20, generator=self.generator).tolist())


class Epochs(IterableDataset[int]):
    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


@st.composite
def stream_cases(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.integers(1, 4))
    split = draw(st.booleans())
    return {
        "total": draw(st.integers(0, 30)),
        "size": world * draw(st.integers(1, 3)) if split else draw(st.integers(1, 4)),
        "world": world,
        "split": split,
        "even": draw(st.booleans()),
        "drop": draw(st.booleans()),
        "static": draw(st.booleans()),
    }


def stream_shards(
    case: dict[str, Any], kind: type[Count] = Count, **options: Any
) -> list[IterableDatasetShard]:
    return [
        IterableDatasetShard(
            kind(case["total"]),
            case["size"],
            case["drop"],
            case["world"],
            rank,
            case["split"],
            even_batches=case["even"],
            static_shapes=case["static"],
            **options,
        )
        for rank in range(case["world"])
    ]


def expected_samples(case: dict[str, Any]) -> list[list[int]]:
    rows = case["size"] // case["world"] if case["split"] else case["size"]
    stride = rows * case["world"]
    shares: list[list[int]] = [[] for _ in range(case["world"])]
    for begin in range(0, case["total"], stride):
        turn = list(range(case["total"]))[begin : begin + stride]
        if len(turn) < stride and case["drop"]:
            break
        if case["even"] and (case["world"] > 1 or case["static"]):
            turn += list(islice(cycle(range(case["total"])), stride - len(turn)))
        for rank in range(case["world"]):
            shares[rank] += turn[rank * rows : (rank + 1) * rows]
    return shares


@given(case=stream_cases())
def test_ranks_get_what_brute_force_gives_them_in_a_stream(case: dict[str, Any]) -> None:
    assert [list(shard) for shard in stream_shards(case)] == expected_samples(case)


@given(case=stream_cases())
def test_a_shard_knows_its_length(case: dict[str, Any]) -> None:
    for rank, share in enumerate(expected_samples(case)):
        shard = IterableDatasetShard(
            range(case["total"]),
            case["size"],
            case["drop"],
            case["world"],
            rank,
            case["split"],
            even_batches=case["even"],
            static_shapes=case["static"],
        )
        assert len(shard) == len(share)
        assert list(shard) == share


@given(case=stream_cases())
def test_the_samples_that_are_not_marked_as_padding_are_every_sample_once(case: dict[str, Any]) -> None:
    collate = MetaCollate(list)
    seen: list[int] = []
    for shard in stream_shards(case, mark_padding=True):
        samples = list(shard)
        for begin in range(0, len(samples), shard.plan.rows):
            batch = collate(samples[begin : begin + shard.plan.rows])
            if isinstance(batch, BatchWithMeta):
                assert batch.real_in_step == case["total"] % shard.plan.stride
                seen += batch.batch[: batch.real]
            else:
                seen += batch
    stride = stream_shards(case)[0].plan.stride
    kept = case["total"] - (case["total"] % stride if case["drop"] else 0)
    assert sorted(seen) == list(range(kept))


@pytest.mark.parametrize("kind", [Count, Seekable])
@given(case=stream_cases(), rounds=st.integers(0, 4))
def test_going_on_gives_exactly_the_samples_that_were_left(
    kind: type[Count], case: dict[str, Any], rounds: int
) -> None:
    wholes = [list(shard) for shard in stream_shards(case, kind)]
    rests = stream_shards(case, kind)
    for shard, whole in zip(rests, wholes, strict=True):
        remaining = copy(shard)
        remaining.starts = (rounds * shard.plan.stride,)
        assert list(remaining) == whole[rounds * shard.plan.rows :]


def test_of_a_dataset_that_can_seek_nothing_is_read_twice() -> None:
    dataset = Seekable(100)
    shard = IterableDatasetShard(dataset, 4, num_processes=2, process_index=1, starts=(80,))
    assert list(shard)[:4] == [84, 85, 86, 87]
    assert dataset.read <= 20 + 8  # the remaining samples, and what padding would need


def test_a_generator_of_the_dataset_is_seeded_with_the_epoch() -> None:
    shards = [IterableDatasetShard(Shuffled(), 5, num_processes=2, process_index=rank) for rank in (0, 1)]
    epochs: list[list[int]] = []
    for epoch in (0, 1):
        for shard in shards:
            shard.set_epoch(epoch)
        epochs.append(list(shards[0]) + list(shards[1]))
        assert sorted(epochs[-1]) == list(range(20))
    assert epochs[0] != epochs[1]


def test_the_epoch_reaches_the_dataset() -> None:
    shard = IterableDatasetShard(Epochs(), 2)
    shard.set_epoch(7)
    assert list(shard) == [7] * 4


def test_a_batch_that_does_not_divide_cannot_be_split_in_a_stream() -> None:
    with pytest.raises(ValueError, match="batch_size=3 is not a round multiple of num_processes=2"):
        IterableDatasetShard(Count(4), 3, num_processes=2, split_batches=True)


def test_collating_without_marks_adds_nothing() -> None:
    batch = MetaCollate(default_collate)([1, 2])
    assert torch.equal(batch, torch.tensor([1, 2]))
