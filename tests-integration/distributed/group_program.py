"""Run by `test_nccl_gpu.py` under torchrun: every collective once, and the groups of meshes.

The argument is `nccl` (with gloo beside it, as accel joins the group of a GPU), `gloo` (on a GPU, which
several ranks may share) or `cpu`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from accel_ops.collectives import broadcast_object_list, gather, gather_object, reduce
from accel_plugins.parallelism.config import mesh_of
from accel_state import PartialState, environ, runtime
from accel_state.collectives import TorchCollectives, group_timeout, set_group_timeout

OPTIONS: dict[str, dict[str, Any]] = {"nccl": {}, "gloo": {"backend": "gloo"}, "cpu": {"cpu": True}}


def main(mode: str) -> None:
    state = PartialState(**OPTIONS[mode])
    device = state.device
    if not dist.is_initialized():  # one rank joins a group as several do
        dist.init_process_group(**runtime._group_options(state.runtime, environ.read(), {}))
    rank, world = dist.get_rank(), dist.get_world_size()
    if mode == "nccl":
        assert dist.get_backend_config() == "cpu:gloo,cuda:nccl"
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.bound_device_id == device
        assert group_timeout(device) == runtime.NCCL_TIMEOUT
    check_collectives(TorchCollectives(device), device, rank, world)
    check_operations(device, rank, world)
    if mode != "gloo":
        check_groups(device, world)
    if mode == "nccl":
        alone = dist.split_group(split_ranks=[[each] for each in range(world)])
        value = torch.ones(2, device=device)
        dist.all_reduce(value, group=alone)
        assert value.tolist() == [1, 1]
    state.destroy_process_group()
    assert not dist.is_initialized()
    print("all collectives worked")


def check_collectives(collectives: TorchCollectives, device: torch.device, rank: int, world: int) -> None:
    for where in (device, torch.device("cpu")):
        total = torch.full((2,), rank + 1.0, device=where)
        collectives.all_reduce(total)
        assert total.tolist() == [world * (world + 1) / 2] * 2
        rows = torch.empty(world, dtype=torch.bool, device=where)
        collectives.all_gather_into(rows, torch.tensor([rank % 2 == 0], device=where))
        assert rows.tolist() == [each % 2 == 0 for each in range(world)]
        last = torch.full((3,), rank, device=where)
        collectives.broadcast(last, src=world - 1)
        assert last.tolist() == [world - 1] * 3
    assert collectives.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(world)]
    objects: list[Any] = ["of rank 0" if rank == 0 else None]
    collectives.broadcast_object_list(objects, src=0)
    assert objects == ["of rank 0"]
    collectives.barrier()


def check_operations(device: torch.device, rank: int, world: int) -> None:
    """Use the documented operations, which one rank leaves out."""
    assert gather(torch.full((1,), rank, device=device)).tolist() == list(range(world))
    assert gather(torch.full((rank + 1,), rank, device=device)).numel() == world * (world + 1) // 2
    assert reduce(torch.ones(2, device=device), "sum").tolist() == [world, world]
    assert gather_object([rank]) == list(range(world))
    assert broadcast_object_list(["of rank 0" if rank == 0 else None]) == ["of rank 0"]


def check_groups(device: torch.device, world: int) -> None:
    """Reduce in the groups of a mesh, which have the timeout of the default group."""
    limit = group_timeout(device) / 2
    set_group_timeout(limit)
    groups = mesh_of(device.type, {"dp_replicate": 1, "dp_shard": world}).get_all_groups()
    assert [group.size() for group in groups] == [1, world]
    assert {group_timeout(device, group) for group in groups} == {limit}
    for group in groups:
        for where in (device, torch.device("cpu")):
            value = torch.ones(1, device=where)
            dist.all_reduce(value, group=group)
            assert value.item() == group.size()


if __name__ == "__main__":
    main(sys.argv[1])
