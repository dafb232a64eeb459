"""Collectives on nested data over gloo: every operation, element type and kind of mistake."""

from __future__ import annotations

import os
from collections import UserDict, namedtuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from accel_ops import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    copy_tensor_to_devices,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from accel_state.partial_state import PartialState
from harness import distributed

Pair = namedtuple("Pair", "left right")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 8, shape, generator=torch.Generator().manual_seed(rank)).float().to(dtype)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    raw = (part.contiguous().view(-1).view(torch.uint8) for part in (left, right))
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*raw)


def check_gather(world_size: int) -> None:
    rank = PartialState(cpu=True).process_index

    def data(of: int) -> dict[str, object]:
        return {
            "types": [values(of, (of + 1, 3), dtype) for dtype in DTYPES],
            "scalars": Pair(torch.tensor(of), (torch.tensor(of / 2),)),
            "empty on rank 0": torch.arange(2.0 * of).view(of, 2),
            "empty": torch.empty(0, 4, dtype=torch.int64),
            "strided": values(of, (3, 4), torch.float32).t(),
            "conjugate": values(of, (2,), torch.complex64).conj(),
        }

    everyone = [data(of) for of in range(world_size)]
    for _ in range(2):  # the second time with the layout of the first
        found = gather(data(rank))
        for i in range(len(DTYPES)):
            assert same(found["types"][i], torch.cat([part["types"][i] for part in everyone]))
        assert found["scalars"].left.tolist() == list(range(world_size))
        assert found["scalars"].right[0].tolist() == [of / 2 for of in range(world_size)]
        for name in ("empty on rank 0", "empty", "strided", "conjugate"):
            assert same(found[name], torch.cat([part[name] for part in everyone]).resolve_conj()), name


@distributed(world_size=2)
def test_two_ranks_gather_every_type_and_shape() -> None:
    check_gather(2)


@distributed(world_size=4)
def test_four_ranks_gather_every_type_and_shape() -> None:
    check_gather(4)


@distributed(world_size=2)
def test_a_tree_is_one_message_after_one_that_compares_the_calls() -> None:
    rank = PartialState(cpu=True).process_index
    tree = {f"leaf {i}": torch.full((3,), float(rank * 1000 + i)) for i in range(120)}
    with (
        mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as gathers,
        mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcasts,
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reductions,
    ):
        found = gather(tree)
        assert gathers.call_count == 2
        reduce(tree)
        assert (gathers.call_count, reductions.call_count) == (3, 1)
        broadcast(tree)
        assert (gathers.call_count, broadcasts.call_count) == (4, 1)
    assert found["leaf 119"].tolist() == [119.0] * 3 + [1119.0] * 3


@pytest.mark.parametrize("rows", [(600_000, 600_000), (600_000, 10), (0, 300_000)])
@distributed(world_size=2)
def test_large_tensors_gather_whether_even_or_not(rows: tuple[int, int]) -> None:
    rank = PartialState(cpu=True).process_index
    mine = torch.arange(float(rows[rank])) + rank
    for found in (gather(mine), gather([mine, torch.tensor([rank])])[0]):
        assert torch.equal(
            found, torch.cat([torch.arange(float(count)) + of for of, count in enumerate(rows)])
        )


@distributed(world_size=2)
def test_a_large_conjugated_view_is_broadcast_by_value() -> None:
    rank = PartialState(cpu=True).process_index
    mine = torch.full((200_000,), complex(rank, 1)).conj()
    assert mine.is_conj()
    broadcast([mine], from_process=1)
    assert torch.equal(mine.resolve_conj(), torch.full((200_000,), 1 - 1j))


@pytest.mark.parametrize("what", ["shape", "type", "structure"])
@distributed(world_size=4)
def test_structures_that_differ_are_an_error_on_every_rank(what: str) -> None:
    rank = PartialState(cpu=True).process_index
    other = {
        "shape": {"x": torch.ones(2, 4)},
        "type": {"x": torch.ones(2, 3).long()},
        "structure": [torch.ones(2, 3)] * 50,
    }[what]
    mine = other if rank == 2 else {"x": torch.ones(2, 3)}
    for _ in range(2):
        with pytest.raises(
            DistributedOperationException, match=r"0 .*data\['x'\]: float32\[\*, 3\]\n1 .*\n2 "
        ):
            gather(mine)
        assert gather(torch.tensor(rank)).tolist() == [0, 1, 2, 3]


@distributed(world_size=2)
def test_broadcast_overwrites_in_place_for_every_type() -> None:
    rank = PartialState(cpu=True).process_index

    def data(of: int) -> list[torch.Tensor]:
        return [
            *(values(of, (3, 2), dtype) for dtype in DTYPES),
            torch.tensor(of),
            torch.full((700, 500), of).t(),
            torch.full((300_000,), float(of)),
        ]

    for source in (0, 1):
        mine = data(rank)
        assert broadcast(mine, from_process=source) is mine
        assert all(same(left, right) for left, right in zip(mine, data(source), strict=True))


@distributed(world_size=4)
def test_sums_and_means_equal_those_of_plain_torch() -> None:
    state = PartialState(cpu=True)
    rank, everyone = state.process_index, range(state.num_processes)
    tree = [values(rank, (5, 2), dtype) for dtype in DTYPES] + [torch.full((300_000,), float(rank))]
    for reduction, divisor in (("sum", 1), ("mean", 4)):
        found = reduce(tree, reduction)
        for i, dtype in enumerate(DTYPES):
            wide = torch.complex128 if dtype.is_complex else torch.float64
            total = torch.stack([values(of, (5, 2), dtype).to(wide) for of in everyone]).sum(0)
            wanted = total.to(dtype).to(wide) if reduction == "sum" else total / divisor
            tolerance = 0.13 if dtype.is_floating_point and dtype.itemsize == 1 else 0.01
            torch.testing.assert_close(found[i].to(wide), wanted, rtol=tolerance, atol=tolerance)
            floats = dtype.is_floating_point or dtype.is_complex
            assert found[i].dtype == (dtype if floats or reduction == "sum" else torch.float32)
        assert found[-1].unique().tolist() == [6 / divisor]
    assert torch.equal(tree[-1], torch.full((300_000,), float(rank)))


@distributed(world_size=2)
def test_objects_travel() -> None:
    rank = PartialState(cpu=True).process_index
    assert gather_object([f"{rank}.{i}" for i in range(rank + 1)]) == ["0.0", "1.0", "1.1"]
    objects = [rank, {"rank": rank}]
    assert broadcast_object_list(objects, from_process=1) is objects
    assert objects == [1, {"rank": 1}]
    assert copy_tensor_to_devices(torch.arange(3) if rank else None).tolist() == [0, 1, 2]


@distributed(world_size=4)
def test_padding_makes_tensors_equally_long() -> None:
    rank = PartialState(cpu=True).process_index
    found = pad_across_processes(
        {"x": torch.ones(rank, 2), "y": torch.tensor([[rank] * (4 - rank)])}, pad_index=-1
    )
    assert found["x"].shape == (3, 2)
    assert found["x"][:, 0].tolist() == [1.0] * rank + [-1.0] * (3 - rank)
    assert found["y"].shape == (1, 4 - rank)
    found = pad_across_processes(torch.ones(2, rank + 1), dim=-1, pad_first=True)
    assert found[1].tolist() == [0.0] * (3 - rank) + [1.0] * (rank + 1)


@distributed(world_size=2)
def test_a_table_shows_where_each_rank_is_and_what_it_calls() -> None:
    with mock.patch.dict(os.environ, ACCELERATE_DEBUG_MODE="1"):
        rank = PartialState(cpu=True).process_index
    tree = {"x": torch.ones(2, 3)}
    with pytest.raises(DistributedOperationException) as error:
        gather(tree) if rank == 0 else reduce(tree)
    rows = str(error.value).splitlines()[-2:]
    assert all("test_nested_collectives.py:" in row and "data['x']: float32[" in row for row in rows)
    assert "gather" in rows[0]
    assert "reduce" in rows[1]
    with pytest.raises(DistributedOperationException, match="different operations"):
        gather_object([1]) if rank == 0 else broadcast(tree)
    with pytest.raises(DistributedOperationException, match=r"data\['x'\]: float32\[2, 4\]"):
        broadcast({"x": torch.ones(2, 3 + rank)})
    # In debug mode also at a barrier.
    with pytest.raises(DistributedOperationException, match=r"wait_for_everyone\(\) +-\n.* gather "):
        PartialState().wait_for_everyone() if rank == 0 else gather(tree)
    PartialState().wait_for_everyone()
    assert gather(torch.tensor([rank])).tolist() == [0, 1]


class Fragile(UserDict[str, torch.Tensor]):
    """Nested data that sometimes cannot be built."""

    fails = False

    def __init__(self, data: object = ()) -> None:
        if Fragile.fails:
            raise MemoryError
        super().__init__(data)  # pyright: ignore[reportArgumentType, reportCallIssue]


@distributed(world_size=2)
def test_a_rank_that_fails_in_the_middle_of_a_gather_can_take_part_in_the_next() -> None:
    state = PartialState(cpu=True)
    large = Fragile({"x": torch.full((5000,), float(state.process_index))})
    gather(large)
    Fragile.fails = state.process_index == 0
    try:
        gather(large)
    except MemoryError:
        assert state.process_index == 0
    finally:
        Fragile.fails = False
    for _ in range(2):
        assert gather(large)["x"].tolist() == [0.0] * 5000 + [1.0] * 5000
        assert gather([torch.ones(1)])[0].tolist() == [1.0, 1.0]
