"""What the main process reads reaches every rank as it was read, each sample once."""

from __future__ import annotations

import pickle
from collections import UserDict
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader

from accel_train.data.dispatcher import (
    DataLoaderDispatcher,
    RowSplit,
    count_rows,
    row_layout,
)
from accel_train.data.scatter import MainProcessReadError, receive, send
from accel_train.data.shards import BatchWithMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class Pair(NamedTuple):
    left: Tensor
    right: list[str]


@dataclass
class Record:
    ids: Tensor
    name: str


class Table:
    """What the threads that stand for ranks have in common: what is sent to each."""

    def __init__(self, world: int) -> None:
        self.scattered: list[Queue[Tensor]] = [Queue() for _ in range(world)]
        self.announced: list[Queue[list[Any]]] = [Queue() for _ in range(world)]
        self.scatters = 0
        self.objects = 0


class Collectives:
    """The two collectives that dispatching needs, between threads."""

    def __init__(self, table: Table, rank: int, world_size: int) -> None:
        self.table, self.rank, self.world_size = table, rank, world_size

    def start_scatter(self, out: Tensor, parts: Sequence[Tensor] | None, src: int) -> Callable[[], None]:
        assert src == 0
        if parts is not None:
            self.table.scatters += 1
            for queue, part in zip(self.table.scattered, parts, strict=True):
                queue.put(part.clone())

        def finish() -> None:
            part = self.table.scattered[self.rank].get(timeout=30)
            assert out.shape == part.shape
            out.copy_(part)

        return finish

    def broadcast_object_list(self, objects: list[Any], src: int) -> None:
        assert src == 0
        if self.rank == 0:
            self.table.objects += 1
            for queue in self.table.announced:
                queue.put(objects[:])
        objects[:] = self.table.announced[self.rank].get(timeout=30)


def dispatch(
    batches: Callable[[], Iterator[Any]], row_split: RowSplit
) -> tuple[list[list[Any]], list[Any], Table]:
    """Run every rank in a thread; give what each got, with whether it was the last, and its error."""

    def parts() -> Iterator[list[BatchWithMeta | None]]:
        for turn in row_split.rounds(batches()):
            yield row_split.parts(turn)

    return scatter(parts(), row_split.num_processes)


def scatter(
    parts: Iterator[Sequence[BatchWithMeta | None]], world: int
) -> tuple[list[list[Any]], list[Any], Table]:
    table = Table(world)
    got: list[list[Any]] = [[] for _ in range(world)]
    errors: list[Any] = [None] * world

    def run(rank: int) -> None:
        collectives: Any = Collectives(table, rank, world)
        try:
            got[rank].extend(receive(collectives) if rank else send(parts, collectives))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors[rank] = error

    threads = [Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return got, errors, table


def ids(got: list[list[Any]]) -> list[list[list[int]]]:
    return [[loaded.batch["ids"].tolist() for loaded, _ in rank] for rank in got]


def numbered(lengths: Sequence[int]) -> list[dict[str, Any]]:
    batches: list[dict[str, Any]] = []
    first = 0
    for length in lengths:
        numbers = list(range(first, first + length))
        batches.append({"ids": torch.tensor(numbers), "names": [str(number) for number in numbers]})
        first += length
    return batches


@given(
    lengths=st.lists(st.integers(1, 5), max_size=7),
    world=st.integers(1, 4),
    split=st.booleans(),
    even=st.booleans(),
    drop=st.booleans(),
)
def test_rows_are_split_in_order_and_each_comes_once(
    lengths: list[int], world: int, split: bool, even: bool, drop: bool
) -> None:
    row_split = RowSplit(num_processes=world, split=split, even=even, drop_last=drop)
    expected = 0
    seen: list[int] = []
    for turn in row_split.rounds(iter(numbered(lengths))):
        parts = row_split.parts(turn)
        assert len(parts) == world
        rows = [len(part.batch["ids"]) for part in parts if part is not None]
        if even:
            assert len(rows) == world
        if (
            len({len(batch["ids"]) for batch in turn}) > 1
            or len(turn) < row_split.batches_per_step_all_ranks
            or split
        ):
            assert max(rows) - min(rows) <= (0 if even else 1)
        for part in parts:
            if part is not None:
                assert part.batch["names"] == [str(number) for number in part.batch["ids"].tolist()]
                assert part.real_in_step == sum(len(batch["ids"]) for batch in turn)
                seen += part.batch["ids"].tolist()[: part.real]
        expected += sum(len(batch["ids"]) for batch in turn)
    assert seen == list(range(expected))
    whole = len(lengths) - len(lengths) % row_split.batches_per_step_all_ranks
    assert expected == sum(lengths[:whole] if drop else lengths)


def test_batches_that_do_not_fit_together_are_given_whole() -> None:
    wide, narrow = {"ids": torch.zeros(2, 3)}, {"ids": torch.ones(1, 2)}
    parts = RowSplit(num_processes=3).parts([wide, narrow])
    assert [part and (part.batch, part.real) for part in parts] == [(wide, None), (narrow, None), (wide, 0)]
    uneven = RowSplit(num_processes=3, even=False).parts([wide, narrow])
    assert uneven[2] is None
    with pytest.raises(ValueError, match="cannot split the batch that it read"):
        RowSplit(num_processes=2, split=True).parts([{"loss": torch.tensor(1.0)}])


def test_a_slice_function_gets_the_whole_round() -> None:
    calls: list[tuple[int, slice, int, int]] = []

    def every_other(batch: Any, rows: slice, *, process_index: int, num_processes: int) -> Any:
        calls.append((len(batch["ids"]), rows, process_index, num_processes))
        return {"ids": batch["ids"][process_index::num_processes]}

    parts = RowSplit(num_processes=2, slice_fn=every_other).parts(numbered([3, 2]))
    assert [part and (part.batch["ids"].tolist(), part.real) for part in parts] == [
        ([0, 2, 4], 3),
        ([1, 3, 0], 2),
    ]
    assert calls == [(6, slice(0, 3), 0, 2), (6, slice(3, 6), 1, 2)]


BATCHES = [
    {"ids": torch.arange(6).reshape(2, 3), "scale": torch.tensor(0.5)},
    [torch.zeros(0, 4), torch.ones(3, dtype=torch.bool), torch.tensor([1 + 2j])],
    Pair(torch.arange(3, dtype=torch.uint8), ["a", "b", "c"]),
    UserDict(x=torch.ones(2, dtype=torch.bfloat16), y=None),
    {"nested": (torch.arange(4)[::2], {"deep": [torch.randn(1, 2, 3).transpose(0, 2)]}), 3: "text"},
    Record(torch.arange(2), "one"),
    torch.arange(5.0, requires_grad=True),
    {"sparse": torch.eye(3).to_sparse(), "float8": torch.ones(2).to(torch.float8_e4m3fn)},
    ["only", "text"],
    {},
]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        dense = [t.to_dense() if t.is_sparse else t for t in (first, second)]
        bits = [t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t for t in dense]
        return first.dtype == second.dtype and torch.equal(*bits)
    if type(first) is not type(second):
        return False
    if isinstance(first, Record):
        return same([first.ids, first.name], [second.ids, second.name])
    if isinstance(first, dict | UserDict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch 2.11's own pickles
@pytest.mark.parametrize("others", [[], BATCHES[:2], BATCHES], ids=len)
@pytest.mark.parametrize("batch", BATCHES)
def test_any_batch_arrives_as_it_was_read(batch: Any, others: list[Any]) -> None:
    batches = [batch, *others, batch, batch]
    got, errors, _ = scatter(iter([[BatchWithMeta(read, 2, 7)] * 2 for read in batches]), 2)
    assert errors == [None, None]
    for rank in got:
        assert [(loaded.real, loaded.real_in_step) for loaded, _ in rank] == [(2, 7)] * len(batches)
        assert all(same(loaded.batch, read) for (loaded, _), read in zip(rank, batches, strict=True))


def test_changing_a_received_tensor_in_place_leaves_graphs_of_the_others_alone() -> None:
    got, _, _ = scatter(iter([[BatchWithMeta([torch.ones(2), torch.ones(2)])] * 2]), 2)
    first, second = got[1][0][0].batch
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * first).sum()
    second.zero_()
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("split", [True, False])
def test_every_rank_gets_its_part_and_knows_the_last(world: int, split: bool) -> None:
    lengths = [world] * 7 + [1]
    got, errors, _ = dispatch(lambda: iter(numbered(lengths)), RowSplit(num_processes=world, split=split))
    assert errors == [None] * world
    assert [[last for _, last in rank] for rank in got] == [[False] * (len(got[0]) - 1) + [True]] * world
    real = [
        number
        for turn in zip(*got, strict=True)
        for loaded, _ in turn
        for number in loaded.batch["ids"].tolist()[: loaded.real]
    ]
    assert real == list(range(7 * world + 1))


def test_a_round_of_the_shapes_of_the_one_before_is_one_collective() -> None:
    batches = [{"ids": torch.zeros(2, 3), "kind": "x"}] * 40
    _, _, table = dispatch(lambda: iter(batches), RowSplit(num_processes=2))
    assert (table.scatters, table.objects) == (20, 2), "the layouts, twenty rounds, and the end"


def test_a_new_structure_is_announced() -> None:
    batches = [*numbered([2, 2, 2, 2]), torch.ones(2), torch.ones(2), *numbered([2, 2])]
    got, errors, table = dispatch(lambda: iter(batches), RowSplit(num_processes=2))
    assert errors == [None, None]
    assert [type(loaded.batch) for loaded, _ in got[1]] == [dict, dict, Tensor, dict]
    assert (table.scatters, table.objects) == (4, 5), "names are not tensors"


def test_a_rank_without_a_part_of_the_last_round_knows_that_the_one_before_was_its_last() -> None:
    batches = numbered([1, 1, 1, 1, 1])
    got, errors, _ = dispatch(lambda: iter(batches), RowSplit(num_processes=2, even=False))
    assert errors == [None, None]
    assert ids(got) == [[[0], [2], [4]], [[1], [3]]]
    assert [[last for _, last in rank] for rank in got] == [[False, False, True], [False, True]]


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_an_error_of_the_main_process_reaches_all(good: int) -> None:
    def batches() -> Iterator[Any]:
        yield from numbered([1] * good)
        raise OSError("disk on fire")

    got, errors, _ = dispatch(batches, RowSplit(num_processes=2))
    assert [len(rank) for rank in got] == [good // 2] * 2, "what was read before comes first"
    assert isinstance(errors[0], OSError)
    assert isinstance(errors[1], MainProcessReadError)
    assert "OSError: disk on fire" in str(errors[1])


@pytest.mark.parametrize("good", [0, 2])
@pytest.mark.parametrize("make", [lambda local: local(x=torch.ones(2)), lambda local: [local]])
def test_a_batch_that_cannot_be_pickled_is_an_error_on_all_ranks(
    make: Callable[[Any], Any], good: int
) -> None:
    class Local(dict[str, Any]):
        """A class that other processes cannot import."""

    def batches() -> Iterator[Any]:
        yield from numbered([2] * 2 * good)
        yield from [make(Local)] * 2

    got, errors, _ = dispatch(batches, RowSplit(num_processes=2))
    assert isinstance(errors[0], (AttributeError, pickle.PicklingError))
    assert isinstance(errors[1], MainProcessReadError)
    assert [len(rank) for rank in got] == [good, good]


def test_nothing_to_read_is_no_error() -> None:
    got, errors, _ = dispatch(lambda: iter(()), RowSplit(num_processes=2))
    assert got == [[], []]
    assert errors == [None, None]


def test_rows_are_counted_cut_and_joined() -> None:
    batch = {"ids": torch.arange(3), "names": ("a", "b", "c"), "scale": torch.tensor(2.0), "kind": "x"}
    layout = row_layout(batch)
    assert count_rows(batch, layout) == 3
    assert count_rows({"kind": "x"}, row_layout({"kind": "x"})) is None
    parts = RowSplit(num_processes=2, split=True).parts([batch])
    assert [part and part.real for part in parts] == [2, 1]
    assert same(parts[1] and parts[1].batch, {**batch, "ids": torch.tensor([2, 0]), "names": ("c", "a")})
    parts = RowSplit(num_processes=3).parts([batch, batch])
    joined = [
        {**batch, "ids": torch.tensor(i), "names": tuple("abc"[n] for n in i)}
        for i in ([0, 1], [2, 0], [1, 2])
    ]
    assert same([part and part.batch for part in parts], joined)


def image(number: int, height: int | None = None) -> Tensor:
    return torch.full((1 + number % 3 if height is None else height, 2), float(number))


FORMS: dict[str, Callable[[list[int]], Any]] = {
    "images first": lambda rows: {
        "images": [image(i) for i in rows],
        "id": torch.tensor(rows),
        "meta": [{"k": i} for i in rows],
    },
    "ids first": lambda rows: {"id": torch.tensor(rows), "tokens": [[i] * (1 + i % 3) for i in rows]},
    "images of one height": lambda rows: {"images": [image(i, 3) for i in rows], "id": torch.tensor(rows)},
    "detection": lambda rows: (
        [image(i) for i in rows],
        [{"boxes": torch.full((i % 4, 4), float(i)), "k": i} for i in rows],
    ),
    "detection, one height": lambda rows: (
        tuple(image(i, 3) for i in rows),
        tuple({"boxes": torch.full((i % 4, 4), float(i)), "k": i} for i in rows),
    ),
    "samples": lambda rows: [image(i) for i in rows],
    "samples of one height": lambda rows: [image(i, 3) for i in rows],
    "samples of the height of a batch": lambda rows: [image(i, 4) for i in rows],
    "dicts": lambda rows: [{"x": image(i), "k": i} for i in rows],
    "token lists": lambda rows: [[i] * (1 + i % 3) for i in rows],
    "texts and labels": lambda rows: ([f"text {i}" for i in rows], rows),
    "fields": lambda rows: [torch.tensor(rows), torch.tensor(rows)[:, None] * torch.ones(3)],
    "nested fields": lambda rows: {
        "pair": (torch.tensor(rows), torch.tensor(rows)),
        "weights": torch.ones(9),
    },
    "a list and a value of the batch": lambda rows: {
        "id": rows,
        "images": [image(i) for i in rows],
        "of": "x",
    },
}


def samples_in(data: Any) -> list[set[float]]:
    """The numbers of the samples of each field or list of objects, in order."""

    def numbers(item: Any) -> set[float]:
        if isinstance(item, Tensor):
            return set(item.flatten().tolist())
        if isinstance(item, dict):
            return set().union(*map(numbers, item.values()))
        if isinstance(item, list | tuple):
            return set().union(*map(numbers, item))
        return {float(str(item).rpartition(" ")[2])}

    return [numbers(item) for item in data]


def columns_of(form: str, batch: Any) -> list[list[set[float]]]:
    if isinstance(batch, dict):
        values = [value for key, value in batch.items() if key not in {"weights", "of"}]
        return [
            column
            for value in values
            for column in columns_of("fields" if type(value) is tuple else "", value)
        ]
    if form.startswith(("detection", "texts", "fields")):
        return [samples_in(field) for field in batch]
    return [samples_in(batch)]


@pytest.mark.parametrize("form", FORMS)
@given(
    size=st.integers(1, 5),
    total=st.integers(1, 21),
    world=st.integers(2, 3),
    split=st.booleans(),
    even=st.booleans(),
    known=st.booleans(),
)
def test_the_fields_of_every_sample_stay_together(
    form: str, size: int, total: int, world: int, split: bool, even: bool, known: bool
) -> None:
    if split:  # what has two readings in a complete batch cannot be sent whole then
        size = (2 + size) * world
        assume(known and total >= size > 4)
    batches = [FORMS[form](list(range(i, min(i + size, total)))) for i in range(0, total, size)]
    row_split = RowSplit(num_processes=world, split=split, even=even, batch_size=size if known else None)
    seen: list[float] = []
    layout = None
    for turn in row_split.rounds(iter(batches)):
        layout = row_split.layout(turn) if layout is None else layout
        for part in row_split.parts(turn, layout):
            if part is None or part.real == 0:
                continue
            first, *others = columns_of(form, part.batch)
            assert all(len(numbers) == 1 for numbers in first)
            assert all(other == first for other in others)
            seen += [number for numbers in first for number in numbers][: part.real]
    assert seen == [float(i) for i in range(total)]


@pytest.mark.parametrize("split", [True, False])
def test_alone_a_dispatcher_is_a_loader(split: bool) -> None:
    loader = DataLoaderDispatcher(list(range(7)), split_batches=split, batch_size=2)
    assert isinstance(loader, DataLoader)
    batches = [(batch.tolist(), loader.end_of_dataloader, loader.remainder) for batch in loader]
    assert batches == [([0, 1], False, -1), ([2, 3], False, -1), ([4, 5], False, -1), ([6], True, 1)]
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (4, 2, 7)
