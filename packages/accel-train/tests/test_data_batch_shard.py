"""Every sample goes to exactly one rank, whatever is split, padded or dropped."""

from __future__ import annotations

from itertools import chain, cycle, islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from accel_train.data.samplers import SeedableRandomSampler
from accel_train.data.shards import BatchSamplerShard

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
        for number, batch in enumerate(list(shard)):
            real = shard.padded.get(number, len(batch))
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
            batches = list(shard.iterate_from(position))
            assert len(batches) == shard.length_from(position)
            for number, batch in enumerate(batches[:steps]):
                seen += batch[: shard.padded.get(number, len(batch))]
        position += (steps or 0) * parts[0].stride
    assert sorted(seen) == list(range(case["total"]))


@given(case=cases(), rounds=st.integers(0, 5))
def test_continuing_gives_exactly_the_batches_that_were_left(case: dict[str, Any], rounds: int) -> None:
    for shard in shards(case):
        whole = list(shard)
        if isinstance(shard.sampler, SeedableRandomSampler):
            shard.sampler.set_epoch(0)
        assert list(shard.iterate_from(rounds * shard.stride)) == whole[rounds:]


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
        mine = list(shard)
        counts.append(len(mine))
        for number, batch in enumerate(mine):
            seen += batch[: shard.padded.get(number, len(batch))]
        if even:
            assert len(shard) == len(mine)
            assert list(shard.iterate_from(rounds * shard.stride)) == mine[rounds:]
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
    assert [list(shard) for shard in shards] == shares
    assert [shard.padded for shard in shards] == real
    assert {len(shard) for shard in shards} == {len(shares[0])}


def test_batches_without_a_size_are_split_evenly() -> None:
    batches = [[0, 1, 2, 3], [4], [5, 6, 7]]
    shards = [BatchSamplerShard(Batches(batches), 2, rank, split_batches=True) for rank in range(2)]
    assert [list(shard) for shard in shards] == [[[0, 1], [4], [5, 6]], [[2, 3], [0], [7, 0]]]
    assert [shard.padded for shard in shards] == [{}, {1: 0, 2: 1}]
    assert shards[1].padded_rows == 0, "several sizes: the batch itself must be asked"


def test_a_shard_of_a_seeded_order_goes_on_to_the_next_epoch() -> None:
    sampler = SeedableRandomSampler(range(6), data_seed=3)
    shard = BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), 2, 0)
    first, second = list(shard), list(shard)
    assert sampler.epoch == 2
    sampler.set_epoch(0)
    assert (list(shard), list(shard)) == (first, second)
    assert first != second


def test_a_batch_that_does_not_divide_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="batch_size=4 is not a multiple of num_processes=3"):
        BatchSamplerShard(BatchSampler(range(8), 4, drop_last=False), 3, 0, split_batches=True)


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="process_index=2"):
        BatchSamplerShard(BatchSampler(range(8), 4, drop_last=False), 2, 2)


@pytest.mark.parametrize("seeded", [True, False])
def test_a_random_order_is_replayed(seeded: bool) -> None:
    generator = torch.Generator().manual_seed(5) if seeded else None
    shard = BatchSamplerShard(BatchSampler(RandomSampler(range(20), generator=generator), 3, drop_last=False))
    whole = list(shard)
    order = shard.order
    following = list(shard)
    assert following != whole

    if generator is not None:
        generator.manual_seed(99)
    else:
        torch.manual_seed(99)
    before = torch.get_rng_state()
    assert list(shard.iterate_from(6, order)) == whole[2:]
    assert torch.equal(torch.get_rng_state(), before)
    if generator is not None:
        assert list(shard) == following
