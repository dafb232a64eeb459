"""An iterable dataset is sharded like any other, and what pads it is known as such."""

from __future__ import annotations

from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, default_collate

from accel_train.data.shards import BatchWithMeta, IterableDatasetShard, MetaCollate

if TYPE_CHECKING:
    from collections.abc import Iterator


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
def cases(draw: st.DrawFn) -> dict[str, Any]:
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


def shards(case: dict[str, Any], kind: type[Count] = Count, **options: Any) -> list[IterableDatasetShard]:
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


def expected(case: dict[str, Any]) -> list[list[int]]:
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


@given(case=cases())
def test_ranks_get_what_brute_force_gives_them(case: dict[str, Any]) -> None:
    assert [list(shard) for shard in shards(case)] == expected(case)


@given(case=cases())
def test_a_shard_knows_its_length(case: dict[str, Any]) -> None:
    for rank, share in enumerate(expected(case)):
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


@given(case=cases())
def test_the_samples_that_are_not_marked_as_padding_are_every_sample_once(case: dict[str, Any]) -> None:
    collate = MetaCollate(list)
    seen: list[int] = []
    for shard in shards(case, mark_padding=True):
        samples = list(shard)
        for begin in range(0, len(samples), shard.plan.rows):
            batch = collate(samples[begin : begin + shard.plan.rows])
            if isinstance(batch, BatchWithMeta):
                assert batch.real_in_step == case["total"] % shard.plan.stride
                seen += batch.batch[: batch.real]
            else:
                seen += batch
    stride = shards(case)[0].plan.stride
    kept = case["total"] - (case["total"] % stride if case["drop"] else 0)
    assert sorted(seen) == list(range(kept))


@pytest.mark.parametrize("kind", [Count, Seekable])
@given(case=cases(), rounds=st.integers(0, 4))
def test_going_on_gives_exactly_the_samples_that_were_left(
    kind: type[Count], case: dict[str, Any], rounds: int
) -> None:
    wholes = [list(shard) for shard in shards(case, kind)]
    rests = shards(case, kind)
    for shard, whole in zip(rests, wholes, strict=True):
        rest = shard.starting_at((rounds * shard.plan.stride,))
        assert list(rest) == whole[rounds * shard.plan.rows :]


def test_of_a_dataset_that_can_seek_nothing_is_read_twice() -> None:
    dataset = Seekable(100)
    shard = IterableDatasetShard(dataset, 4, num_processes=2, process_index=1).starting_at((80,))
    assert list(shard)[:4] == [84, 85, 86, 87]
    assert dataset.read <= 20 + 8  # the rest, and what padding would need


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


def test_a_batch_that_does_not_divide_cannot_be_split() -> None:
    with pytest.raises(ValueError, match="batch_size=3 is not a multiple of num_processes=2"):
        IterableDatasetShard(Count(4), 3, num_processes=2, split_batches=True)


def test_collating_without_marks_adds_nothing() -> None:
    batch = MetaCollate(default_collate)([1, 2])
    assert torch.equal(batch, torch.tensor([1, 2]))
