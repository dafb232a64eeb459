"""Every pair of calls that do not fit together is refused on every rank, and the ranks can go on."""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

import pytest
import torch

from accel_ops import DistributedOperationException, broadcast, broadcast_object_list, gather, reduce
from accel_state import PartialState
from harness import distributed

if TYPE_CHECKING:
    from collections.abc import Callable


def contents() -> dict[str, Any]:
    """Nested data of which no two fit together."""
    return {
        "base": [torch.ones(3), torch.ones(2)],
        "type of the same size": [torch.ones(3, dtype=torch.int32), torch.ones(2)],
        "larger type": [torch.ones(3, dtype=torch.float64), torch.ones(2)],
        "smaller type": [torch.ones(3).half(), torch.ones(2)],
        "longer": [torch.ones(5), torch.ones(2)],
        "other order": [torch.ones(2), torch.ones(3)],
        "same number of elements": [torch.ones(3, 1), torch.ones(2)],
        "fewer leaves": [torch.ones(3)],
        "more leaves": [torch.ones(3), torch.ones(2), torch.ones(1)],
        "keys": {"a": torch.ones(3), "b": torch.ones(2)},
        "other keys": {"a": torch.ones(3), "c": torch.ones(2)},
        "large": [torch.ones(1 << 18), torch.ones(2)],
        "larger": [torch.ones(1 << 19), torch.ones(2)],
        "nothing": [],
    }


def calls() -> dict[str, Callable[[], Any]]:
    """Calls of which no two fit together."""
    found: dict[str, Callable[[], Any]] = {}
    for name, data in contents().items():
        found[f"reduce {name}"] = lambda data=data: reduce(data, "sum")
        found[f"broadcast {name}"] = lambda data=data: broadcast(data)
    for name in ("type of the same size", "other keys", "large"):
        found[f"gather {name}"] = lambda name=name: gather(contents()[name])
    base = contents()["base"]
    for reduction in ("mean", "max", "min", "prod"):
        found[reduction] = lambda reduction=reduction: reduce(base, reduction)
    found["scale"] = lambda: reduce(base, "sum", scale=0.5)
    found["from 1"] = lambda: broadcast(base, from_process=1)
    for count in (0, 1, 3):
        found[f"{count} objects"] = lambda count=count: broadcast_object_list([None] * count)
    found["objects from 1"] = lambda: broadcast_object_list([None], from_process=1)
    return found


def refused(call: Callable[[], Any]) -> str:
    """Return the message of the refusal."""
    with pytest.raises(DistributedOperationException) as raised:
        call()
    return str(raised.value)


@distributed(world_size=2)
def test_all_pairs_of_calls_on_two_ranks() -> None:
    state = PartialState(cpu=True)
    for pair in permutations(calls().values(), 2):
        assert "The processes call" in refused(pair[state.process_index])
    assert reduce(torch.ones(2), "sum").tolist() == [2.0, 2.0]
    assert gather(torch.ones(2)).tolist() == [1.0] * 4


@pytest.mark.parametrize("odd", [0, 1, 2])
@distributed(world_size=3)
def test_one_rank_of_three_that_differs(odd: int) -> None:
    state = PartialState(cpu=True)
    found = calls()
    usual = found.pop("reduce base")
    for call in found.values():
        refused(call if state.process_index == odd else usual)
    assert reduce(torch.ones(2), "max").tolist() == [1.0, 1.0]


@distributed(world_size=2)
def test_a_call_that_was_made_before_is_compared_again() -> None:
    rank = PartialState(cpu=True).process_index
    for _ in range(3):
        reduce([torch.ones(3)], "sum")
        reduce([torch.ones(4)], "sum")
    message = refused(lambda: reduce([torch.ones(3 + rank)], "sum"))
    assert [row.split()[-1] for row in message.splitlines()[-2:]] == ["float32[3]", "float32[4]"]


@distributed(world_size=2)
def test_the_refusal_names_the_calls() -> None:
    rank = PartialState(cpu=True).process_index
    message = refused(lambda: reduce(torch.ones(1), ("sum", "mean")[rank], scale=2))
    for name, row in zip(("sum", "mean"), message.splitlines()[-2:], strict=True):
        assert f"reduce('{name}', scale=2.0)" in row


@distributed(world_size=2)
def test_the_order_of_keys_and_the_name_of_the_sum_do_not_matter() -> None:
    rank = PartialState(cpu=True).process_index
    names = ("ab", "ba")[rank]
    data = {name: torch.tensor([float(ord(name))]) for name in names}
    found = reduce(data, ("sum", "none")[rank])
    assert {name: value.item() for name, value in found.items()} == {"a": 2.0 * ord("a"), "b": 2.0 * ord("b")}


TYPES = [torch.uint8, torch.int16, torch.uint16, torch.int64, torch.uint32, torch.uint64, torch.float16]


@pytest.mark.parametrize("reduction", ["max", "min", "prod"])
@distributed(world_size=3)
def test_every_type_knows_its_order_on_the_wire(reduction: str) -> None:
    rank = PartialState(cpu=True).process_index
    combined = {"max": max, "min": min, "prod": lambda values: values[0] * values[1] * values[2]}[reduction]
    values = [3, 1, 2]
    for dtype in TYPES:
        assert reduce(torch.tensor([values[rank]], dtype=dtype), reduction).tolist() == [combined(values)]
    beyond = [(1 << 63) + 5, 7, 1]  # larger than any signed number
    found = reduce(torch.tensor([beyond[rank]], dtype=torch.uint64), reduction)
    assert found.tolist() == [combined(beyond) % (1 << 64)]
