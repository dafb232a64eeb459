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
from accel_ops.collectives import broadcast_from, chained_operation, verify_operation
from accel_state.errors import StalledCollectiveError
from accel_state.rank_status import Call, explain

HERE = Path(__file__).name
X = torch.ones(2, 3)


def refusal(world, *calls) -> str:
    """What every rank raises when each makes its own call."""

    def body(rank: int) -> str:
        with pytest.raises(DistributedOperationException) as error:
            calls[rank]()
        return str(error.value)

    first, *others = world(len(calls), debug=True).run(body)
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
    assert "reduce ('sum'" in rows[1]
    assert all("data['x']: float32[2, 3]" in row for row in rows)


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
    assert "data that does not fit" in message
    assert "data['x']: float32[2, 3]" in message
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

    for rank, found in enumerate(world(2, debug=True).run(body)):
        assert found == [[1, 1, 1], [2], [1], [0, 1], [0], [1, rank]]


def test_the_same_wrong_leaf_everywhere_is_an_ordinary_type_error(world) -> None:
    for error in world(2, debug=True).run(lambda rank: gather({"x": "text"})):
        assert isinstance(error, TypeError)


def test_without_debug_mode_no_call_sites_are_compared(world) -> None:
    ranks = world(2)
    ranks.run(lambda rank: reduce(X))
    assert ranks.messages == ["all_gather_object", "all_reduce"]


def test_a_table_of_many_leaves_is_cut() -> None:
    many = tuple((f"[{i}]", "float32", (i,)) for i in range(20))
    message = explain(
        [Call(where="a.py:1", operation="gather", leaves=many), Call(where="b.py:2", operation="reduce")]
    )
    assert "data[5]: float32[5]; and 14 more" in message
    assert message.splitlines()[-1].split() == ["1", "b.py:2", "reduce", "no", "tensors"]


def test_decorated_collectives_are_compared_and_name_their_callers(world) -> None:
    @verify_operation
    def count(tensor, scale=1):
        return tensor.shape[0] * scale

    @chained_operation
    def outer(tensor):
        return count(tensor)

    def body(rank: int) -> tuple[int, str, str]:
        equal = count(tensor=X, scale=2)
        with pytest.raises(DistributedOperationException) as inner:
            count(torch.ones(2 + rank))
        with pytest.raises(DistributedOperationException) as chained:
            outer(torch.ones(2 + rank))
        assert isinstance(chained.value.__cause__, DistributedOperationException)
        return equal, str(inner.value), str(chained.value)

    results = world(2, debug=True).run(body)
    assert results[0] == results[1]
    assert results[0][0] == 4
    assert "float32[3]" in results[0][1]
    assert "outer" in results[0][2]
    assert outer(X) == 2


def test_an_error_of_a_decorated_function_keeps_its_class() -> None:
    @chained_operation
    def stall() -> None:
        raise StalledCollectiveError("rank 1 is at train.py:8")

    with pytest.raises(TimeoutError, match="stall"):
        stall()


def test_a_broadcast_takes_its_source_by_another_name(world) -> None:
    def body(rank: int) -> float:
        tensor = torch.tensor([float(rank)])
        assert broadcast_from(tensor, src=1) is tensor
        return tensor.item()

    assert world(2).run(body) == [1.0, 1.0]
