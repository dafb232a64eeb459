"""Collectives of the simulated accelerator give what NCCL's give; DDP, FSDP2 and TP on it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from harness import distributed


def here() -> torch.device:
    return torch.device("npu", dist.get_rank())


def filled(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(value), device=here())


@distributed(world_size=2, device="npu")
def test_every_collective_gives_what_it_should_and_the_host_waits_for_none() -> None:
    rank = dist.get_rank()
    found = {}
    with torch.npu.counting() as counted:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            found[f"all_reduce {op}"] = filled(rank + 1, 3)
            dist.all_reduce(found[f"all_reduce {op}"], op=op)
        for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8):
            found[str(dtype)] = filled(rank, 1).to(dtype)
            dist.all_reduce(found[str(dtype)], op=dist.ReduceOp.MAX)
        found["broadcast"] = filled(rank, 2)
        dist.broadcast(found["broadcast"], 1)
        gathered = [filled(9, 2), filled(9, 2)]
        dist.all_gather(gathered, filled(rank, 2))
        found["all_gather"] = torch.stack(gathered)
        uneven = [filled(9, 1), filled(9, 2)]
        dist.all_gather(uneven, filled(rank, 1 + rank))
        found["all_gather uneven"] = torch.cat(uneven)
        found["all_gather_into_tensor"] = filled(9, 4)
        dist.all_gather_into_tensor(found["all_gather_into_tensor"], filled(rank, 1, 2))  # another shape
        found["reduce_scatter_tensor"] = filled(9, 2)
        dist.reduce_scatter_tensor(
            found["reduce_scatter_tensor"], torch.arange(4.0).to(here(), non_blocking=True)
        )
        found["reduce_scatter"] = filled(9, 2)
        dist.reduce_scatter(found["reduce_scatter"], [filled(1, 2), filled(3, 2)], op=dist.ReduceOp.AVG)
        found["all_to_all_single"] = filled(9, 2)
        dist.all_to_all_single(found["all_to_all_single"], filled(rank, 2))
        received = [filled(9, 1 + 2 * rank), filled(9, 2 + 2 * rank)]
        dist.all_to_all(received, [filled(rank, 1 + rank), filled(rank, 3 + rank)])
        found["all_to_all"] = torch.cat(received)
        found["reduce"] = filled(1, 2)
        dist.reduce(found["reduce"], 0)
        lists = [filled(9, 1), filled(9, 1)] if rank == 0 else None
        dist.gather(filled(rank, 1), lists, dst=0)
        found["scatter"] = filled(9, 1)
        dist.scatter(found["scatter"], [filled(5, 1), filled(6, 1)] if rank == 0 else None, src=0)
        found["p2p"] = filled(9, 2)
        sends = [
            dist.P2POp(dist.isend, filled(rank, 2), 1 - rank),
            dist.P2POp(dist.irecv, found["p2p"], 1 - rank),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()
        found["coalesced"] = filled(1, 2)
        with dist.distributed_c10d._coalescing_manager(device=here(), async_ops=True) as several:
            dist.all_reduce(found["coalesced"])
            dist.all_reduce(other := filled(1, 3))
        several.wait()
        group = dist.new_group([0, 1])
        found["subgroup"] = filled(1, 1)
        dist.all_reduce(found["subgroup"], group=group)
    dist.destroy_process_group(group)
    assert not counted.synchronisations
    assert counted.collectives["allreduce"] == 11
    assert {name: value.float().flatten().tolist() for name, value in found.items()} == {
        "all_reduce RedOpType.SUM": [3, 3, 3],
        "all_reduce RedOpType.AVG": [1.5, 1.5, 1.5],
        "all_reduce RedOpType.MAX": [2, 2, 2],
        **{f"torch.{dtype}": [1] for dtype in ("bfloat16", "float16", "int64", "bool", "uint8")},
        "broadcast": [1, 1],
        "all_gather": [0, 0, 1, 1],
        "all_gather uneven": [0, 1, 1],
        "all_gather_into_tensor": [0, 0, 1, 1],
        "reduce_scatter_tensor": [4.0 * rank, 4.0 * rank + 2],
        "reduce_scatter": [1 + 2 * rank] * 2,
        "all_to_all_single": [0, 1],
        "all_to_all": [0, 1, 1] if rank == 0 else [0, 0, 0, 1, 1, 1, 1],
        "reduce": [2, 2] if rank == 0 else [1, 1],
        "scatter": [5 + rank],
        "p2p": [1 - rank] * 2,
        "coalesced": [2, 2],
        "subgroup": [2],
    }
    assert other.tolist() == [2, 2, 2]
    if rank == 0:
        assert torch.cat(lists).tolist() == [0, 1]
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    host = torch.ones(2)
    dist.all_reduce(host)
    assert host.tolist() == [2, 2]


@distributed(world_size=2, device="npu")
def test_a_result_that_nobody_waits_for_is_a_race() -> None:
    value = filled(1, 3)
    work = dist.all_reduce(value, async_op=True)
    value + 1
    (race,) = torch.npu.take_races()
    assert race.endswith("reads what the stream of a process group may not have written: a wait is missing")
    work.wait()
    assert value.tolist() == [2, 2, 2]
    assert not torch.npu.take_races()


@distributed(world_size=2, device="npu")
def test_two_ranks_cannot_share_a_device() -> None:
    group = dist.new_group([0, 1])
    with pytest.raises(RuntimeError, match="Duplicate device detected: rank 0 and rank 1 both on device 0"):
        dist.all_reduce(torch.ones(1, device="npu:0"), group=group)
    dist.destroy_process_group(group)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))


def train(model: nn.Module, device: torch.device) -> list[float]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(4, 8, 8), torch.randn(4, 8, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in zip(inputs, targets, strict=True):
        x, y = (each.chunk(2)[dist.get_rank()].to(device) for each in (x, y))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@distributed(world_size=2, device="npu")
def test_ddp_trains_as_on_the_cpu() -> None:
    on_host = nn.parallel.DistributedDataParallel(make_model())
    on_device = nn.parallel.DistributedDataParallel(make_model().to(here()), device_ids=[dist.get_rank()])
    assert train(on_host, torch.device("cpu")) == train(on_device, here())
    for right, found in zip(on_host.parameters(), on_device.parameters(), strict=True):
        assert torch.equal(right, found.cpu())


@distributed(world_size=2, device="npu")
def test_fsdp2_trains_as_ddp_on_the_cpu() -> None:
    right = train(nn.parallel.DistributedDataParallel(make_model()), torch.device("cpu"))
    mesh = init_device_mesh("npu", (2,))
    model = make_model().to(here())
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    torch.testing.assert_close(train(model, here()), right, rtol=1e-5, atol=1e-6)
    lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = fully_shard(
        make_model().to(here()), mesh=mesh, mp_policy=lower, offload_policy=CPUOffloadPolicy()
    )
    torch.testing.assert_close(train(model, here()), right, rtol=0.05, atol=0.05)


@distributed(world_size=2, device="npu")
def test_tensor_parallel_computes_as_one_device() -> None:
    mesh = init_device_mesh("npu", (2,))
    model = parallelize_module(
        make_model().to(here()), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    inputs = torch.ones(3, 8, device=here())
    torch.testing.assert_close(model(inputs), make_model().to(here())(inputs))
