"""Collectives on tensors of XLA devices: between several ranks as threads, and in a process group of one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch_xla

from accel import PartialState
from accel.utils import (
    broadcast,
    gather,
    pad_across_processes,
    recursively_apply,
    reduce,
    send_to_device,
)
from accel_state import runtime, xla_devices
from accel_state.collectives import RecordedCollectives, TorchCollectives
from accel_state.errors import DistributedOperationException
from accel_state.testing import ThreadRanks
from accel_state.topology import free_port
from nightly.xla.problems import counted

XLA = torch.device("xla", 0)
CPU = torch.device("cpu")
MOVED = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
]


def data(rank: int, dtype: torch.dtype = torch.float32, *, rows: int = 2):
    """Nested tensors of several shapes and dtypes."""
    numbers = (torch.arange(24).reshape(2, 3, 4) + rank).to(dtype)
    return {
        "deep": [numbers[:rows], numbers[0, :, 0], (torch.tensor(rank).to(dtype),)],
        "flags": torch.tensor([rank % 2 == 0, True]),
        "whole": torch.arange(3) * rank,
        "none": torch.empty(0, 2, dtype=dtype),
        "half": torch.full((2, 2), rank + 0.5, dtype=torch.bfloat16),
    }


def on_cpu(tree):
    return recursively_apply(torch.Tensor.cpu, tree)


def check(size: int, call) -> None:
    """Compare what a call gives on XLA tensors with what it gives on those of the CPU, on all ranks."""
    results = {}
    for device in (CPU, XLA):
        ranks = ThreadRanks(size=size, device=device)
        results[device] = ranks.run(lambda rank, device=device: call(rank, device))
    for found, expected in zip(results[XLA], results[CPU], strict=True):
        if isinstance(expected, Exception):
            assert (type(found), str(found)) == (type(expected), str(expected))
            continue
        assert not isinstance(found, Exception), found
        recursively_apply(lambda leaf: _check_device(leaf), found)
        torch.testing.assert_close(on_cpu(found), expected, rtol=0, atol=0)


def _check_device(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.device == XLA
    return leaf


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_tensors_of_every_type_are_gathered(dtype):
    check(3, lambda rank, device: gather(send_to_device(data(rank, dtype), device)))


def test_tensors_of_different_sizes_are_gathered():
    check(3, lambda rank, device: gather(send_to_device(data(rank, rows=rank), device)))


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("reduction", ["sum", "mean", "max", "min", "prod"])
def test_tensors_are_reduced(reduction, scale):
    check(3, lambda rank, device: reduce(send_to_device(data(rank), device), reduction, scale))


@pytest.mark.parametrize("source", [0, 2])
def test_tensors_are_broadcast_also_over_infinite_ones(source):
    def call(rank, device):
        tree = data(rank) | {"inf": torch.full((2,), 1.0 if rank == source else float("inf"))}
        return broadcast(send_to_device(tree, device), source)

    check(3, call)


def test_tensors_of_different_sizes_are_padded():
    check(
        2, lambda rank, device: pad_across_processes(send_to_device(data(rank, rows=rank + 1), device), 0, 7)
    )


@pytest.mark.parametrize("call", [gather, reduce, broadcast])
def test_structures_that_differ_are_refused_on_all_ranks(call):
    def differing(rank):
        return call({"ab"[rank]: torch.ones(2, device=XLA)})

    found = ThreadRanks(size=2, device=XLA).run(differing)
    assert [type(one) for one in found] == [DistributedOperationException] * 2
    rows = "*" if call is gather else 2
    assert all(f"data['{name}']: float32[{rows}]" in str(found[0]) for name in "ab")


def test_a_message_for_each_dtype_and_one_for_the_host():
    ranks = ThreadRanks(size=2, device=XLA)
    ranks.run(lambda rank: gather(send_to_device(data(rank), XLA)))
    assert sorted(ranks.messages) == ["all_gather_into"] * 4 + ["all_gather_object"]


@pytest.fixture
def joined(monkeypatch):
    """The runtime of a process group of one rank, as PJRT's ranks join it."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("XLA_ALWAYS_ALLREDUCE", "1")  # also where there is one rank
    PartialState()
    alone = runtime.current()
    one = runtime._join(alone, {}, {})
    yield one
    runtime.destroy_process_group()


def test_a_group_is_joined_as_pjrt_says_more_than_once(joined):
    assert (joined.backend, joined.collectives.rank, joined.collectives.world_size) == ("xla", 0, 1)
    assert joined.collectives.all_gather_object("a") == ["a"]
    joined.barrier()
    runtime.destroy_process_group()
    again = runtime._join(runtime.current(), {}, {})
    assert again.collectives.all_gather_object("b") == ["b"]


# XLA's compiler for the CPU crashes on sums over ranks of these types.
SIXTEEN_BITS = {torch.bfloat16, torch.int16}


@pytest.mark.parametrize("dtype", [*MOVED, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("device", [CPU, XLA], ids=str)
def test_messages_of_every_type_arrive(joined, dtype, device):
    if device == XLA and dtype in SIXTEEN_BITS:
        pytest.skip("needs a TPU: XLA's compiler for the CPU crashes on sums of 16 bits over ranks")
    collectives = RecordedCollectives(XLA, xla_devices)
    sent = (torch.arange(6) % 3).to(dtype)
    wide = torch.complex64 if dtype.is_complex else torch.float32  # float8 and bool cannot be compared
    tensor = sent.to(device)
    out = torch.empty(1, 6, dtype=dtype, device=device)
    collectives.all_gather_into(out, tensor)
    collectives.broadcast(tensor, 0)
    scattered = torch.empty(6, dtype=dtype, device=device)
    collectives.start_scatter(scattered, [tensor], 0)()
    for found in (out[0], tensor, scattered):
        assert found.device.type == device.type
        torch.testing.assert_close(found.cpu().to(wide), sent.to(wide), rtol=0, atol=0)
    for op in ("sum",) if dtype.is_complex else ("sum", "max", "min", "prod"):
        total = copy.deepcopy(tensor)
        collectives.all_reduce(total, op=op)
        torch.testing.assert_close(total.cpu().to(wide), sent.to(wide), rtol=0, atol=0)


def test_only_the_source_adds_to_a_broadcast(joined):
    tensor = torch.tensor([1.0, float("inf"), float("nan")], device=XLA)
    assert xla_devices.broadcast(tensor, is_source=False).tolist() == [0, 0, 0]
    torch.testing.assert_close(
        xla_devices.broadcast(tensor, is_source=True).cpu(), tensor.cpu(), equal_nan=True
    )


def test_messages_wait_for_nothing_and_need_no_program_of_their_own(joined):
    collectives = RecordedCollectives(XLA, xla_devices)

    def counts():
        return counted("ExecuteTime", "TransferFromDeviceTime")

    tensor = torch.arange(4.0, device=XLA)
    torch_xla.sync(wait=True)
    before = counts()
    out = torch.empty(4, device=XLA)
    collectives.all_gather_into(out, tensor * 2)
    collectives.all_reduce(out)
    collectives.broadcast(out, 0)
    assert counts() == before
    torch_xla.sync(wait=True)
    assert counts() == (before[0] + 1, before[1])
    assert out.tolist() == [0, 2, 4, 6]


def test_where_the_compiler_shards_messages_go_over_the_host(joined):
    assert not xla_devices.is_replicated(), "torch_xla has not launched this process"
    assert type(joined.collectives) is TorchCollectives
    tensor = torch.arange(4.0, device=XLA)
    joined.collectives.all_reduce(tensor)
    assert (tensor.device, tensor.tolist()) == (XLA, [0, 1, 2, 3])
