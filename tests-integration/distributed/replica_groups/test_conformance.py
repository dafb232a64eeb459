"""The strategies of replica groups on the ranks of a group: the public suite, with a real lighthouse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from accel_plugins.parallelism.config import ParallelismConfig
from accel_plugins.precision import build_precision
from accel_plugins.testing import StrategySubject, check_strategy
from accel_plugins.torchft import strategy as replica_groups
from accel_state.libraries import is_installed
from accel_state.partial_state import PartialState
from accel_state.settings.model import Settings
from accel_state.settings.run import ReplicaSettings
from harness import cases, distributed

pytestmark = pytest.mark.skipif(not is_installed("torchft"), reason="needs torchft")

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", cases(["ddp", "fsdp2"], always={"fsdp2"}))
@distributed(world_size=2)
def test_a_group_of_two_ranks_conforms(kind, tmp_path):
    from torchft.coordination import LighthouseServer

    runtime = PartialState(cpu=True).runtime
    build = replica_groups.ReplicaStrategy if kind == "ddp" else replica_groups.ShardedReplicaStrategy
    handlers = {} if kind == "ddp" else {ParallelismConfig: ParallelismConfig(dp_shard_size=2)}
    made, lighthouses = [], []

    def make():
        address = [None]
        if runtime.topology.rank == 0:  # a new one, since it would wait for the managers of the others
            lighthouses.append(
                LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=5)
            )
            address = [f"http://127.0.0.1:{lighthouses[-1].address().rpartition(':')[2]}"]
        runtime.collectives.broadcast_object_list(address, 0)
        settings = replace(Settings(), replicas=ReplicaSettings(lighthouse=address[0]))
        made.append(build(settings, runtime, build_precision("no", CPU), handlers))
        return made[-1]

    try:
        check_strategy(StrategySubject(make=make, runtime=runtime, directory=tmp_path))
    finally:
        for strategy in made:
            strategy.release()
        runtime.collectives.barrier()
        for lighthouse in lighthouses:
            lighthouse.shutdown()
