"""Batches that are copied on their own stream are waited for, and their memory is kept while it is used."""

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
from accel_train.data.prepare import prepare_data_loader
from accel_train.data.transfer import CopyStream, _pinned

pytestmark = pytest.mark.gpu
ACCELERATOR = torch.accelerator.current_accelerator()
DEVICE = torch.device("cpu") if ACCELERATOR is None else torch.device(ACCELERATOR.type, 0)


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
        self.nodes.record_stream(stream)


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
)
def test_any_batches_are_read_when_they_are_there_and_freed_when_they_may(
    rows: list[Any], kept: list[int], sizes: list[int]
) -> None:
    expected = [contents(row) for row in rows]
    streams = device_streams(DEVICE)
    side = CopyStream(streams)
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
            streams.empty(sizes[number]).fill_(1)  # what was freed is written at once
        assert [contents(batch) for _, batch in held] == [expected[index] for index, _ in held]


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_loader_copies_one_batch_ahead(simulated: Any, dispatch: bool, streamed: bool) -> None:
    rows = list(torch.arange(12.0).reshape(6, 2))
    loader = prepare_data_loader(
        DataLoader(Rows(rows) if streamed else rows, batch_size=2),
        DEVICE,
        put_on_device=True,
        non_blocking=True,
        dispatch_batches=dispatch,
    )
    seen, pending = [], []
    for batch in loader:
        seen.append((batch + 0).tolist())
        pending.append(simulated.late_copies() > 0)
        del batch
    assert seen == torch.arange(12.0).reshape(3, 2, 2).tolist()
    assert pending == [True, True, False]


def test_a_loop_that_is_left_early_leaves_nothing_behind() -> None:
    loader = prepare_data_loader(
        DataLoader(list(torch.arange(12.0)), batch_size=2), DEVICE, put_on_device=True, non_blocking=True
    )
    for batch in loader:
        assert (batch + 0).tolist() == [0, 1]
        break
    del batch
    device_streams(DEVICE).empty(8).fill_(1)


@pytest.mark.parametrize("kind", [Graph, RecordedGraph])
def test_the_memory_of_an_object_that_moves_itself_is_kept_while_it_is_used(kind: Any) -> None:
    side = CopyStream(device_streams(DEVICE))
    for number in range(3):
        graph = side.finish_copy(side.start_copy(kind(torch.full((4,), float(number)))))
        assert (graph.nodes + 0).tolist() == [number] * 4
        del graph


def test_the_memory_of_a_batch_is_kept_until_the_work_that_uses_it_is_done() -> None:
    side = CopyStream(device_streams(DEVICE))
    results = []
    for number in range(3):
        rows = torch.full((4,), float(number))
        batch = side.finish_copy(side.start_copy([rows, RecordedGraph(rows)]))
        results.append(batch[0] + batch[1].nodes)  # nobody waits for it
        del batch
    assert [result[0].item() for result in results] == [0, 2, 4]


def test_a_packed_sequence_keeps_its_sizes_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    side = CopyStream(device_streams(DEVICE))
    transferred = side.finish_copy(side.start_copy(packed))
    assert isinstance(transferred, PackedSequence)
    assert torch.equal((transferred.data + 0).cpu(), packed.data)
    assert transferred.batch_sizes.is_cpu
    assert transferred.batch_sizes.tolist() == packed.batch_sizes.tolist()


def test_what_cannot_be_pinned_is_copied_as_it_is() -> None:
    """Batches of a loader may lie on the device already, or be sparse."""
    sparse, on_device = torch.eye(2).to_sparse(), torch.ones(2, device=DEVICE)
    graph, rows = Graph(torch.ones(3)), torch.arange(2.0)
    pinned = _pinned({"sparse": sparse, "on device": [on_device], "rows": rows, "graph": graph})
    assert pinned["sparse"] is sparse
    assert pinned["on device"][0] is on_device
    assert pinned["rows"].tolist() == rows.tolist()
    assert pinned["graph"] is not graph
