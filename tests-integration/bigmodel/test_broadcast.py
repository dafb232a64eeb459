"""A checkpoint that only rank 0 can read."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch import distributed as dist
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from accel_ops.weights.write import save_state_dict
from accel_state.errors import CheckpointError, MissingDependencyError
from harness import distributed

if TYPE_CHECKING:
    from pathlib import Path


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())


@distributed(world_size=2)
def test_ranks_receive_what_rank_0_reads(tmp_path: Path) -> None:
    source = model()
    folder = tmp_path / f"of-rank-{dist.get_rank()}"
    if dist.get_rank() == 0:
        save_state_dict(source.state_dict(), folder, max_shard_size=100)
    with init_empty_weights():
        target = model()
    load_checkpoint_in_model(target, folder, broadcast_from_rank0=True, strict=True)
    for name, tensor in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], tensor), name
    with init_empty_weights():
        other = model()
    load_checkpoint_and_dispatch(other, folder, device_map={"": "cpu"}, broadcast_from_rank0=True)
    assert torch.equal(other[0].weight, source[0].weight)


@distributed(world_size=2)
def test_every_rank_hears_of_a_checkpoint_that_rank_0_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    told = ""
    try:
        load_checkpoint_in_model(nn.Linear(2, 2), tmp_path, broadcast_from_rank0=True)
    except CheckpointError as error:
        told = str(error)
    assert "is not a safetensors file" in told


@distributed(world_size=2)
def test_every_rank_hears_of_a_library_that_rank_0_lacks() -> None:
    told = ""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setitem(sys.modules, "huggingface_hub", None)
        try:
            load_checkpoint_in_model(nn.Linear(2, 2), "some/model", broadcast_from_rank0=True)
        except MissingDependencyError as error:
            told = str(error)
    assert "install accel-bigmodel[hub]" in told


@distributed(world_size=2)
def test_distributed_parameters_get_their_part(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).reshape(4, 2)
    folder = tmp_path / "shared"
    if dist.get_rank() == 0:
        save_state_dict({"weight": whole, "bias": torch.ones(4)}, folder)
    target = nn.Linear(2, 4)
    target.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
    load_checkpoint_in_model(target, folder, broadcast_from_rank0=True, strict=True)
    rank = dist.get_rank()
    assert torch.equal(target.weight.to_local(), whole[2 * rank : 2 * rank + 2])
    part = tmp_path / f"rank-{rank}"
    save_state_dict({"weight": whole[2 * rank : 2 * rank + 2] + 1, "bias": torch.ones(4)}, part)
    load_checkpoint_in_model(target, part, full_state_dict=False)
    assert torch.equal(target.weight.full_tensor(), whole + 1)
