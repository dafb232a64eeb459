"""Process groups of meshes have the timeout of the run."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from accel_plugins.parallelism.config import ParallelismConfig
from accel_state.collectives import group_timeout
from accel_state.partial_state import PartialState
from harness import distributed

CPU = torch.device("cpu")


@pytest.mark.parametrize("minutes", [7, 8])  # the second finds the mesh of the first
@distributed(world_size=4)
def test_the_groups_of_a_mesh_have_the_timeout_of_the_run(minutes: int) -> None:
    before = group_timeout(CPU)
    try:
        PartialState(cpu=True, timeout=timedelta(minutes=minutes))
        config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None
        groups = [*mesh.get_all_groups(), mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()]
        subgroups = [group for group in groups if group is not dist.group.WORLD]
        assert len(subgroups) >= 2
        assert {group_timeout(CPU, group) for group in subgroups} == {timedelta(minutes=minutes)}
    finally:
        PartialState(cpu=True, timeout=before)
