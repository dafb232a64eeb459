"""Processes find each other under every launcher, and through what the user passes."""

from __future__ import annotations

import pytest

from harness.programs import TORCHRUN, Ended, Program, run_programs

REPORT = """
total = torch.tensor([float(10 ** state.process_index)])
state.runtime.collectives.all_reduce(total)
topology = state.runtime.topology
print(topology.launcher, topology.rank, topology.world_size, topology.local_rank, int(total), state.backend)
"""
BEGIN = """\
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from accel_state import PartialState
"""
PLAIN = f"{BEGIN}state = PartialState(cpu=True){REPORT}"
THREADS = f"{PLAIN}print(torch.get_num_threads() == max(1, len(os.sched_getaffinity(0)) // 2))"
BY_HAND = f"""{BEGIN}
rank = int(os.environ["MY_RANK"])
state = PartialState(cpu=True, init_method="file://" + os.environ["RENDEZVOUS"], rank=rank, world_size=2)
{REPORT}"""
BEFORE = f"""{BEGIN}
rank = int(os.environ["MY_RANK"])
dist.init_process_group("gloo", init_method="file://" + os.environ["RENDEZVOUS"], rank=rank, world_size=2)
state = PartialState(cpu=True)
{REPORT}
PartialState._reset_state()
print(dist.is_initialized())
"""
AGAIN = f"""{BEGIN}
if os.environ["RANK"] == "0":  # in place of torchrun's agent, whose store outlives groups
    port = int(os.environ["MASTER_PORT"])
    agent = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
state = PartialState(cpu=True)
{REPORT}
state.destroy_process_group()
PartialState._reset_state()
state = PartialState(cpu=True)
{REPORT}"""
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{world_size}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{world_size}",
    "MASTER_PORT": "{port}",
}
SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_NTASKS": "{world_size}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_TASKS_PER_NODE": "{world_size}",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "localhost",
    "MASTER_PORT": "{port}",
}
HAND = {"MY_RANK": "{rank}", "RENDEZVOUS": "{folder}/meeting"}
PROGRAMS = {
    "torchrun": Program(PLAIN, variables=TORCHRUN),
    "Open MPI": Program(THREADS, variables=OPEN_MPI),
    "Slurm": Program(THREADS, variables=SLURM),
    "again": Program(AGAIN, variables={**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}),
    "by hand": Program(BY_HAND, variables=HAND),
    "before": Program(BEFORE, variables=HAND),
}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ended]]:
    """How the ranks of each program ended."""
    return run_programs(PROGRAMS, tmp_path_factory.mktemp("programs"))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "again"])
def test_processes_of_every_launcher_find_each_other(ends, name) -> None:
    launcher = name if name in {"torchrun", "Open MPI", "Slurm"} else "torch.distributed"
    for rank, end in enumerate(ends[name]):
        assert (end.code, end.errors) == (0, "")
        place, *rest = end.output.splitlines()
        assert place == f"{launcher} {rank} 2 {rank} 11 gloo"
        assert set(rest) <= {"True"}  # threads are limited under MPI and Slurm; a group stays with its maker


def test_a_group_begins_again_after_its_end(ends: dict[str, list[Ended]]) -> None:
    assert [end.code for end in ends["again"]] == [0, 0]  # who ends last finds no agent, and says so
    assert [end.output for end in ends["again"]] == [
        f"torchrun {rank} 2 {rank} 11 gloo\n" * 2 for rank in (0, 1)
    ]
