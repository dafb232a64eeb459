"""Batches that are copied on their own stream, by a device that copies as late, or as early, as it may."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset

from accel_ops.tree import walk
from accel_state.streams import device_streams
from accel_state.testing import late_device
from accel_train.data.loader import CopyStream, _pinned
from accel_train.data.prepare import prepare_data_loader

CPU = torch.device("cpu")
SCHEDULES = ("late", "early")


class Pair(NamedTuple):
    first: Any
    second: Any


class Graph:
    """Moves its tensors by itself, as batches of graph libraries do."""

    def __init__(self, nodes: torch.Tensor) -> None:
        self.nodes = nodes

    def pin_memory(self) -> Graph:
        return type(self)(self.nodes.pin_memory())

    def to(self, device: Any, non_blocking: bool = False) -> Graph:
        return type(self)(self.nodes.to(device, non_blocking=non_blocking))


class RecordedGraph(Graph):
    def record_stream(self, stream: Any) -> None:
        device_streams(CPU).record_stream(self.nodes, stream)


class Rows(IterableDataset):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shape = st.lists(st.integers(0, 4), max_size=3)
    dtype = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    return st.builds(lambda shape, dtype: (10 * torch.rand(shape)).to(dtype), shape, dtype)


def batches() -> st.SearchStrategy[Any]:
    leaves = (
        tensors()
        | tensors().map(lambda t: t.mT if t.dim() > 1 else t)
        | tensors().map(Graph)
        | tensors().map(RecordedGraph)
        | st.just("text")
        | st.just(pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)]))
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.builds(Pair, inner, inner)
            | st.dictionaries(st.sampled_from("abc"), inner)
        ),
        max_leaves=4,
    )


def contents(batch: Any) -> list[Any]:
    """What a computation on the current stream sees in a batch."""
    values: list[Any] = []
    for _, leaf in walk(batch):
        if isinstance(leaf, Graph):
            values.append(
                (leaf.nodes | leaf.nodes if leaf.nodes.dtype is torch.bool else leaf.nodes + 0).tolist()
            )
        elif isinstance(leaf, torch.Tensor):
            values.append((leaf | leaf if leaf.dtype is torch.bool else leaf + 0).tolist())
        else:
            values.append(leaf)
    return values


@settings(deadline=None)
@given(
    st.lists(batches(), max_size=5),
    st.lists(st.integers(0, 3), max_size=5),
    st.lists(st.integers(0, 40), max_size=5),
    st.sampled_from(SCHEDULES),
)
def test_any_batches_are_read_when_they_are_there_and_freed_when_they_may(
    rows: list[Any], kept: list[int], sizes: list[int], schedule: Any
) -> None:
    expected = [contents(row) for row in rows]
    with late_device(schedule) as device:
        side = CopyStream(device)
        held: list[Any] = []
        flights = [side.start_copy(row) for row in rows[:1]]
        for number, row in enumerate(expected):
            flights += [side.start_copy(upcoming) for upcoming in rows[number + 1 : number + 2]]
            batch = side.finish_copy(flights.pop(0))
            assert contents(batch) == row
            held.append((number, batch))
            del batch
            keep = kept[number] if number < len(kept) else 0
            held = held[-keep:] if keep else []
            if number < len(sizes):
                device.empty(sizes[number]).fill_(1)  # what was freed is written at once
            assert [contents(batch) for _, batch in held] == [expected[index] for index, _ in held]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_loader_copies_one_batch_ahead(schedule: Any, dispatch: bool, streamed: bool) -> None:
    rows = list(torch.arange(12.0).reshape(6, 2))
    loader = prepare_data_loader(
        DataLoader(Rows(rows) if streamed else rows, batch_size=2),
        "cpu",
        put_on_device=True,
        non_blocking=True,
        dispatch_batches=dispatch,
    )
    with late_device(schedule) as device:
        seen, pending = [], []
        for batch in loader:
            seen.append((batch + 0).tolist())
            pending.append(device.pending)
            del batch
    assert seen == torch.arange(12.0).reshape(3, 2, 2).tolist()
    assert pending == ([1, 1, 0] if schedule == "late" else [0, 0, 0])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loop_that_is_left_early_leaves_nothing_behind(schedule: Any) -> None:
    loader = prepare_data_loader(
        DataLoader(list(torch.arange(12.0)), batch_size=2), "cpu", put_on_device=True, non_blocking=True
    )
    with late_device(schedule) as device:
        for batch in loader:
            assert (batch + 0).tolist() == [0, 1]
            break
        del batch
        device.empty(8).fill_(1)


@pytest.mark.parametrize("kind", [Graph, RecordedGraph])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_memory_of_an_object_that_moves_itself_is_kept_while_it_is_used(kind: Any, schedule: Any) -> None:
    with late_device(schedule) as device:
        side = CopyStream(device)
        for number in range(3):
            graph = side.finish_copy(side.start_copy(kind(torch.full((4,), float(number)))))
            assert (graph.nodes + 0).tolist() == [number] * 4
            del graph


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    with late_device() as device:
        side = CopyStream(device)
        transferred = side.finish_copy(side.start_copy(packed))
        assert isinstance(transferred, PackedSequence)
        assert torch.equal(transferred.data + 0, packed.data)
        assert transferred.batch_sizes.tolist() == packed.batch_sizes.tolist()


def test_what_cannot_be_pinned_is_copied_as_it_is() -> None:
    """Batches of a loader may lie on the device already, or be sparse; `meta` stands for another device."""
    sparse, on_device = torch.eye(2).to_sparse(), torch.ones(2, device="meta")
    graph, rows = Graph(torch.ones(3)), torch.arange(2.0)
    for alone in (sparse, on_device):
        with pytest.raises((RuntimeError, NotImplementedError)):
            alone.pin_memory()
    with late_device("late"):
        pinned = _pinned({"sparse": sparse, "on device": [on_device], "rows": rows, "graph": graph})
    assert pinned["sparse"] is sparse
    assert pinned["on device"][0] is on_device
    assert pinned["rows"].tolist() == rows.tolist()
    assert pinned["graph"] is not graph
