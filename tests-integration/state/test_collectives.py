"""What `Collectives` promises, on one process and on several."""

from __future__ import annotations

from threading import BrokenBarrierError
from typing import TYPE_CHECKING

import torch

from accel_state.collectives import SingleCollectives, TorchCollectives
from accel_state.partial_state import PartialState
from accel_state.runtime import current
from accel_state.testing import ThreadRanks
from harness import distributed

if TYPE_CHECKING:
    from accel_state.collectives import Collectives

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
SMALL = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, *UNSIGNED, *SMALL, *COMPLEX, torch.bool]


def values(dtype: torch.dtype, rank: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    """Small values that every type holds exactly, others on every rank."""
    numbers = (torch.arange(6) + rank) % 4
    numbers = numbers.to(torch.complex128) * (1 + 2j) if dtype.is_complex else numbers
    return numbers.to(dtype)[: torch.Size(shape).numel()].reshape(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit: some types know no `==`."""
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*as_bytes)


def check_moves(collectives: Collectives, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mine = values(dtype, collectives.rank, shape)
    world = collectives.world_size
    out = torch.empty((world, *shape), dtype=dtype)
    collectives.all_gather_into(out, mine)
    for rank in range(world):
        assert same(out[rank], values(dtype, rank, shape))
    assert same(mine, values(dtype, collectives.rank, shape))
    for src in range(world):
        tensor = values(dtype, collectives.rank, shape)
        collectives.broadcast(tensor, src)
        assert same(tensor, values(dtype, src, shape))


def check_sum(collectives: Collectives, dtype: torch.dtype) -> None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = sum(values(dtype, rank).to(wide) for rank in range(collectives.world_size))
    tensor = values(dtype, collectives.rank)
    collectives.all_reduce(tensor)
    assert same(tensor, expected.to(dtype))


def check_scatter(collectives: Collectives, dtype: torch.dtype) -> None:
    for src in range(collectives.world_size):
        out = values(dtype, collectives.rank)
        parts = [values(dtype, rank + 1) for rank in range(collectives.world_size)]
        collectives.start_scatter(out, parts if collectives.rank == src else None, src)()
        assert same(out, values(dtype, collectives.rank + 1))


def check_objects(collectives: Collectives) -> None:
    everyone = collectives.all_gather_object({"rank": collectives.rank})
    assert everyone == [{"rank": rank} for rank in range(collectives.world_size)]
    for src in range(collectives.world_size):
        objects = [collectives.rank, "x" * collectives.rank]
        collectives.broadcast_object_list(objects, src)
        assert objects == [src, "x" * src]


def check_all(collectives: Collectives) -> None:
    for dtype in DTYPES:
        for shape in ((2, 3), (), (0,), (3, 0, 2)):
            check_moves(collectives, dtype, shape)
        check_sum(collectives, dtype)
        check_scatter(collectives, dtype)
    check_objects(collectives)
    collectives.barrier()


def test_one_process_keeps_the_promises() -> None:
    check_all(SingleCollectives())


def test_threads_that_stand_for_ranks_keep_the_promises() -> None:
    assert ThreadRanks(size=3).run(lambda rank: check_all(current().collectives)) == [None] * 3


def test_the_runtime_of_before_is_there_after_ranks_as_threads() -> None:
    before = PartialState(cpu=True).runtime
    ThreadRanks(size=2).run(lambda rank: current().collectives.barrier())
    assert current() is before
    PartialState._reset_state()


def test_threads_in_different_collectives_raise() -> None:
    def body(rank: int) -> None:
        collectives = current().collectives
        collectives.barrier() if rank else collectives.all_gather_object(rank)

    errors = ThreadRanks(size=2).run(body)
    assert all(isinstance(error, AssertionError | BrokenBarrierError) for error in errors)
    assert any("different collectives: ['all_gather_object', 'barrier']" in str(error) for error in errors)


@distributed(world_size=2)
def test_two_processes_keep_the_promises() -> None:
    check_all(TorchCollectives(torch.device("cpu")))


@distributed(world_size=4)
def test_four_processes_keep_the_promises() -> None:
    check_all(TorchCollectives(torch.device("cpu")))


@distributed(world_size=2)
def test_a_conjugated_view_is_gathered_by_value() -> None:
    collectives = TorchCollectives(torch.device("cpu"))
    mine = torch.tensor([1 + 2j, 3 + 4j]).conj()
    assert mine.is_conj()
    out = torch.empty(4, dtype=mine.dtype)
    collectives.all_gather_into(out, mine)
    assert out.tolist() == [1 - 2j, 3 - 4j, 1 - 2j, 3 - 4j]
