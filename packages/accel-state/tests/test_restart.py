"""Processes that an elastic agent starts again do not meet the addresses of those before."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from accel_state import process_group, runtime
from accel_state.topology import Topology


def test_only_a_process_that_was_started_again_needs_a_store_of_its_own():
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert (
        runtime._restart_prefix({})
        == runtime._restart_prefix(agent | {"TORCHELASTIC_RESTART_COUNT": "0"})
        == ""
    )
    assert runtime._restart_prefix(agent | {"TORCHELASTIC_RESTART_COUNT": "2"}) == "2"
    assert runtime._restart_prefix({"TORCHELASTIC_RESTART_COUNT": "2"}) == "", "its own store is new anyway"


def test_a_group_after_another_one_has_a_life_of_its_own(monkeypatch):
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    again = agent | {"TORCHELASTIC_RESTART_COUNT": "2"}
    monkeypatch.setattr(process_group, "groups_joined", lambda: 0)  # tests before may have joined some
    assert (runtime._restart_prefix(agent), runtime._restart_prefix(again)) == ("", "2")
    monkeypatch.setattr(process_group, "groups_joined", lambda: 1)
    assert (runtime._restart_prefix(agent), runtime._restart_prefix(again)) == ("0.1", "2.1")
    assert runtime._restart_prefix({}) == "", "its own store is new anyway"


def test_every_life_has_keys_of_its_own_in_the_store_of_the_agent():
    agent = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agent.port)}
    topology = Topology(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="torchrun")
    first, second = (
        runtime._restart_store(life, variables, topology, timedelta(seconds=30)) for life in (1, 2)
    )
    first.set("rank_0", "an address")
    assert first.check(["rank_0"])
    assert not second.check(["rank_0"])
