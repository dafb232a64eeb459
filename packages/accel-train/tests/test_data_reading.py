"""With torchdata, loaders read through its own: it reads their states, and they read its."""

from __future__ import annotations

from copy import copy
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from accel_train.data.adapter import DataLoaderShard
from accel_train.data.prepare import prepare_data_loader, skip_first_batches

if TYPE_CHECKING:
    from collections.abc import Iterator

# torchdata calls what newer versions of torch deprecate.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]
stateful = pytest.importorskip("torchdata.stateful_dataloader")


class Counting(IterableDataset[int]):
    """Numbers; it knows where it is, and counts what was read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.position = 0
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < self.size:
            self.position += 1
            self.read += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def prepare(**options: Any) -> Any:
    return prepare_data_loader(
        DataLoader(Counting(13), batch_size=2, **options), use_stateful_dataloader=True
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_what_is_left_and_the_next_pass_come_as_without_the_break(workers: int) -> None:
    loader = prepare(num_workers=workers)
    assert isinstance(loader.base_dataloader, stateful.StatefulDataLoader)
    batches = iter(loader)
    assert len(list(islice(batches, 3))) == 3
    state = loader.state_dict()
    remaining = [batch.tolist() for batch in batches]
    again = prepare(num_workers=workers)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == remaining
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_a_dataset_with_a_state_is_not_read_from_its_beginning() -> None:
    loader = prepare()
    batches = iter(loader)
    list(islice(batches, 5))
    again = prepare()
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [[10, 11], [12]]
    assert again.dataset.read == 3


def test_the_state_is_that_of_the_batch_at_hand_not_of_the_one_read_ahead() -> None:
    loader = prepare()
    for number, _ in enumerate(loader):
        again = prepare()
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) == 6 - number
        loader.adjust_state_dict_for_prefetch()


def test_the_end_of_a_stateful_loader_is_known() -> None:
    loader = prepare()
    for _ in range(2):
        assert [loader.end_of_dataloader for _ in loader] == [False] * 6 + [True]


@pytest.mark.parametrize(("rank", "real"), [(0, [None, 1]), (1, [None, 0])])
def test_the_padding_of_a_stateful_loader_over_indices_is_known(rank: int, real: list[int | None]) -> None:
    loader: Any = prepare_data_loader(
        DataLoader(list(range(5)), batch_size=2),
        num_processes=2,
        process_index=rank,
        use_stateful_dataloader=True,
    )
    for _ in range(2):
        assert [loader.real_in_batch for _ in loader] == real


def test_a_stateful_loader_stays_one_and_its_own_state_is_taken() -> None:
    raw = stateful.StatefulDataLoader(Counting(13), batch_size=2)
    next(iter(raw))
    batches = iter(raw)
    next(batches)
    prepared = prepare_data_loader(raw)
    assert prepared.use_stateful_dataloader
    prepared.load_state_dict(raw.state_dict())
    expected = [batch.tolist() for batch in batches]
    assert [batch.tolist() for batch in prepared] == expected


def test_map_style_positions_hold_for_any_number_of_ranks() -> None:
    loader = DataLoader(list(range(13)), batch_size=2)
    prepared = prepare_data_loader(loader, use_stateful_dataloader=True)
    batches = iter(prepared)
    seen = next(batches).tolist()
    for rank in (0, 1):
        other = prepare_data_loader(loader, num_processes=2, process_index=rank, use_stateful_dataloader=True)
        other.load_state_dict(prepared.state_dict())
        for batch in other:
            seen += batch.tolist()[: other.real_in_batch]
    assert sorted(seen) == list(range(13))


def test_the_position_in_a_stream_holds_for_any_number_of_ranks() -> None:
    loader = prepare()
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    seen: list[int] = []
    for rank in (0, 1):
        sharded = prepare_data_loader(
            DataLoader(Counting(13), batch_size=2),
            num_processes=2,
            process_index=rank,
            use_stateful_dataloader=True,
        )
        sharded.load_state_dict(loader.state_dict())
        for batch in sharded:
            seen += batch.tolist()[: sharded.real_in_batch]
    assert sorted(seen) == list(range(4, 13))


NUMBERS = list(range(23))


def raw(kind: str, workers: int) -> DataLoader[Any]:
    if kind == "stream":
        return DataLoader(Counting(23), batch_size=2, num_workers=workers)
    return DataLoader(NUMBERS, batch_size=2, shuffle=kind == "shuffled", num_workers=workers)  # type: ignore[arg-type]


def values(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_torchdata_reads_our_state_and_we_read_its(kind: str, workers: int) -> None:
    prepared: Any = prepare_data_loader(raw(kind, workers), use_stateful_dataloader=True)
    assert isinstance(prepared, stateful.StatefulDataLoader)
    assert isinstance(prepared, DataLoaderShard)

    def plain() -> Any:
        loader = raw(kind, workers)
        indices = {"batch_size": 2} if kind == "stream" else {"batch_sampler": loader.batch_sampler}
        return stateful.StatefulDataLoader(loader.dataset, num_workers=workers, **indices)

    batches = iter(prepared)
    begun = values(islice(batches, 3))
    state = prepared.state_dict()
    remaining = values(batches)
    assert len(begun + remaining) == (
        24 if (kind, workers) == ("stream", 2) else 12
    )  # every worker reads all
    plain_loader = plain()
    plain_loader.load_state_dict(state)
    assert values(plain_loader) == remaining

    plain_loader = plain()
    batches = iter(plain_loader)
    values(islice(batches, 5))
    state = plain_loader.state_dict()
    again: Any = prepare_data_loader(raw(kind, workers), use_stateful_dataloader=True)
    again.set_epoch(3)
    again.load_state_dict(state)
    again.set_epoch(4)  # it says nothing about epochs
    resumed = iter(again)
    assert values(islice(resumed, 1)) == values(islice(batches, 1))
    plain_loader = plain()
    plain_loader.load_state_dict(again.state_dict())
    assert values(resumed) == values(plain_loader) == values(batches)


class Resuming(Sampler[int]):
    """Goes on where it was, whoever iterates over it."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return len(NUMBERS)

    def __iter__(self) -> Iterator[int]:
        while self.position < len(NUMBERS):
            self.position += 1
            yield self.position - 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_state_before_the_first_pass_takes_nothing_from_a_sampler_that_knows_where_it_is(
    workers: int,
) -> None:
    bare = stateful.StatefulDataLoader(NUMBERS, batch_size=2, sampler=Resuming(), num_workers=workers)
    loader: Any = prepare_data_loader(bare)
    loader.state_dict()
    assert list(chain.from_iterable(values(loader))) == NUMBERS


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["map", "shuffled", "stream"])
def test_a_resumed_pass_goes_on_and_can_be_resumed_again(kind: str, ranks: int, workers: int) -> None:
    for rank in range(ranks):

        def loader(rank: int = rank) -> Any:
            return prepare_data_loader(
                raw(kind, workers), num_processes=ranks, process_index=rank, use_stateful_dataloader=True
            )

        torch.manual_seed(0)
        first = loader()
        batches = iter(first)
        values(islice(batches, 2))
        state = first.state_dict()
        remaining = values(batches)
        marks = [(first.end_of_dataloader, first.remainder)]
        torch.manual_seed(1)
        second = loader()
        second.load_state_dict(state)
        resumed = iter(second)
        assert values(islice(resumed, 1)) == remaining[:1]
        state = second.state_dict()
        assert values(resumed) == remaining[1:]
        assert (second.end_of_dataloader, second.remainder) == marks[0] or kind == "stream"
        third = loader()
        third.load_state_dict(state)
        assert values(third) == remaining[1:]


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_skipping_after_loading_counts_from_the_beginning(kind: str) -> None:
    loader, other = (prepare_data_loader(raw(kind, 0), use_stateful_dataloader=True) for _ in range(2))
    batches = iter(loader)
    whole = [next(batches) for _ in range(2)]
    other.load_state_dict(loader.state_dict())
    whole += batches
    assert values(skip_first_batches(other, 3)) == values(whole[3:])


def test_what_says_no_position_is_refused() -> None:
    with pytest.raises(ValueError, match=r"neither an accel data loader position nor a state of torchdata"):
        prepare().load_state_dict({"step": 3})


def test_loaders_of_several_classes_are_torchdatas_and_copy() -> None:
    skipped: Any = skip_first_batches(stateful.StatefulDataLoader(NUMBERS, batch_size=2), 3)
    assert values(skipped) == [NUMBERS[i : i + 2] for i in range(6, 23, 2)]
    prepared = prepare()
    for loader in (skip_first_batches(prepared, 2), copy(prepared)):
        assert isinstance(loader, stateful.StatefulDataLoader)
    assert (
        prepare_data_loader(
            stateful.StatefulDataLoader(NUMBERS, batch_size=2, snapshot_every_n_steps=4)
        ).snapshot_every_n_steps
        == 4
    )  # type: ignore[attr-defined]
    assert not isinstance(prepare_data_loader(raw("map", 0)), stateful.StatefulDataLoader)
