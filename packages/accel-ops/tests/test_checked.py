from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accel_ops import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accel_state.runtime import current

HERE = Path(__file__).name
X = torch.ones(2, 3)


def refusal(world, *calls) -> str:
    """What every rank raises when each makes its own call."""

    def body(rank: int) -> str:
        with pytest.raises(DistributedOperationException) as error:
            calls[rank]()
        return str(error.value)

    first, *others = world(len(calls)).run(body)
    assert all(other == first for other in others)
    return first


def test_different_operations_are_an_error_on_every_rank_with_a_table(world) -> None:
    message = refusal(
        world, lambda: gather({"x": X}), lambda: reduce({"x": X}, "sum"), lambda: gather({"x": X})
    )
    title, header, *rows = message.splitlines()
    assert "different operations" in title
    assert header.split()[:2] == ["rank", "call"]
    assert [row.split()[0] for row in rows] == ["0", "1", "2"]
    assert all(f"{HERE}:" in row for row in rows)
    assert "gather" in rows[0]
    assert "reduce('sum', scale=1.0)" in rows[1]
    assert "data['x']: float32[*, 3]" in rows[0]  # the rows may differ there
    assert "data['x']: float32[2, 3]" in rows[1]


@pytest.mark.parametrize(
    ("call", "other"),
    [
        (broadcast, {"a": torch.ones(1), "x": torch.ones(2, 4)}),
        (broadcast, {"a": torch.ones(1), "x": X.int()}),
        (reduce, {"a": torch.ones(1), "x": torch.ones(3, 3)}),
        (gather, {"a": torch.ones(9), "x": torch.ones(2, 4)}),
        (gather, {"a": torch.ones(1), "y": X}),
        (gather, {"a": torch.ones(1), "x": "text"}),
    ],
)
def test_data_that_does_not_fit_is_shown_leaf_by_leaf(world, call, other) -> None:
    message = refusal(world, lambda: call({"a": torch.ones(1), "x": X}), lambda: call(other))
    assert "data that differs" in message
    assert f"data['x']: float32[{'*' if call is gather else 2}, 3]" in message
    assert "data['a']" not in message
    key = list(other)[-1]
    assert f"data['{key}']" in message.splitlines()[-1]


def test_other_arguments_must_agree_too(world) -> None:
    assert "from_process=1" in refusal(world, lambda: broadcast(X, 0), lambda: broadcast(X, 1))
    assert "'mean'" in refusal(world, lambda: reduce(X, "sum"), lambda: reduce(X, "mean"))
    assert "broadcast_object_list" in refusal(
        world, lambda: gather_object([1]), lambda: broadcast_object_list([1])
    )
    assert "dim=1" in refusal(world, lambda: pad_across_processes(X), lambda: pad_across_processes(X, dim=1))


def test_calls_that_agree_go_through(world) -> None:
    def body(rank: int):
        return [
            gather(torch.ones(1 + rank)).tolist(),
            reduce(torch.ones(1), "sum").tolist(),
            broadcast(torch.tensor([rank]), 1).tolist(),
            gather_object([rank]),
            broadcast_object_list([rank]),
            pad_across_processes(torch.ones(1 + rank)).tolist(),
        ]

    for rank, found in enumerate(world(2).run(body)):
        assert found == [[1, 1, 1], [2], [1], [0, 1], [0], [1, rank]]


def test_the_same_wrong_leaf_everywhere_is_an_ordinary_type_error(world) -> None:
    for error in world(2).run(lambda rank: gather({"x": "text"})):
        assert isinstance(error, TypeError)


def test_in_debug_mode_a_barrier_compares_calls_as_well(world) -> None:
    def body(rank: int) -> str:
        with pytest.raises(DistributedOperationException) as error:
            current().barrier() if rank == 0 else gather(X)
        return str(error.value)

    for message in world(2, debug=True).run(body):
        assert "wait_for_everyone()" in message
        assert "gather" in message


def test_the_leaves_of_a_table_are_cut(world) -> None:
    many = [torch.ones(i) for i in range(9)]
    message = refusal(world, lambda: gather(many), lambda: reduce([]))
    assert "data[5]: float32[*]; and 3 more" in message
    assert message.splitlines()[-1].split()[-3:] == ["reduce('mean',", "scale=1.0)", "-"]
