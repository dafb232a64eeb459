from __future__ import annotations

from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_state.environ import patch_environment
from accel_state.errors import SettingsError
from accel_state.partial_state import PartialState
from accel_state.topology import (
    LAUNCHERS,
    CPUInformation,
    Rendezvous,
    Topology,
    check_first_host,
    detect,
    first_host,
    get_cpu_distributed_information,
    gloo_interface,
    gloo_variables,
    rendezvous,
)

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[03-04]",
}


@given(row=st.sampled_from(LAUNCHERS), nodes=st.integers(1, 5), per_node=st.integers(1, 8), data=st.data())
def test_every_launcher_tells_every_rank_its_place(row, nodes, per_node, data):
    world = nodes * per_node
    rank = data.draw(st.integers(0, world - 1))
    environ = {
        row.rank: str(rank),
        row.world_size: str(world),
        row.local_rank: str(rank % per_node),
        row.local_world_size: str(per_node),
        "SLURM_STEP_ID": "0",
    }
    found = detect(environ)
    if row.name == "Slurm" and world == 1:
        assert found == Topology()
        return
    assert found == Topology(
        rank=rank, world_size=world, local_rank=rank % per_node, local_world_size=per_node, launcher=row.name
    )
    assert found.is_main == (rank == 0)
    assert found.is_last == (rank == world - 1)
    assert found.is_local_main == (rank % per_node == 0)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 1))
def test_nodes_of_slurm_may_run_different_numbers_of_processes(counts: list[int]):
    runs = [(count, len([*same])) for count, same in groupby(counts)]
    listed = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    places = [(node, local, count) for node, count in enumerate(counts) for local in range(count)]
    for rank, (node, local, count) in enumerate(places):
        found = detect(
            {
                "SLURM_PROCID": str(rank),
                "SLURM_NTASKS": str(len(places)),
                "SLURM_LOCALID": str(local),
                "SLURM_NODEID": str(node),
                "SLURM_STEP_TASKS_PER_NODE": listed,
                "SLURM_STEP_ID": "0",
            }
        )
        assert (found.rank, found.local_rank, found.local_world_size) == (rank, local, count)


def test_a_process_that_nobody_launched_is_alone():
    assert detect({"PATH": "/bin"}) == Topology(launcher="single")


def test_torchrun_inside_a_slurm_step_wins():
    environ = SRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert detect(environ) == Topology(
        rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="torchrun"
    )


def test_slurm_wins_over_the_pmi_variables_that_srun_sets():
    environ = SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6"}
    assert detect(environ).launcher == "Slurm"
    assert detect(environ).local_world_size == 2


@pytest.mark.parametrize("step", ["4294967290", "4294967291", ""])
def test_the_batch_script_and_the_allocation_shell_are_not_ranks(step):
    environ = SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_ID": step}
    assert detect(environ) == Topology()


def test_the_local_rank_follows_from_the_rank_when_the_launcher_does_not_say_it():
    assert detect({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}).local_rank == 1


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 and WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "many"}, "LOCAL_WORLD_SIZE='many'"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE='0'"),
    ],
)
def test_a_bad_value_names_its_variable(environ, named):
    with pytest.raises(SettingsError, match=named):
        detect(environ)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[03-04]", "node03"),
        ("gpu[7,9-12]", "gpu7"),
        ("a[1-2]-ib,b3", "a1-ib"),
        ("rack[1-2]-gpu[03-04,7],b3", "rack1-gpu03"),
        ("", None),
    ],
)
def test_the_first_host_of_a_node_list(nodes, host):
    assert first_host(nodes) == host


def test_the_address_of_the_environment_wins():
    environ = SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
    assert rendezvous(environ, detect(environ)) == Rendezvous(address="head", port=1234)


def test_slurm_jobs_meet_on_their_first_node_at_a_port_of_their_own():
    first = rendezvous(SRUN, detect(SRUN))
    other = SRUN | {"SLURM_JOB_ID": "4712"}
    assert first.address == "node03"
    assert 1024 < first.port < 32768
    assert rendezvous(other, detect(other)).port != first.port


def test_mpi_on_several_machines_must_say_where_rank_0_is():
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    with pytest.raises(SettingsError, match="MASTER_ADDR"):
        rendezvous(environ, detect(environ))


def test_a_bad_port_is_named():
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}
    with pytest.raises(SettingsError, match="MASTER_PORT='http'"):
        rendezvous(environ, detect(environ))


def test_cpu_information_reads_the_environment_of_the_process():
    with patch_environment(rank=1, world_size=2, local_rank=1, local_world_size=2):
        assert get_cpu_distributed_information() == CPUInformation(
            rank=1, world_size=2, local_rank=1, local_world_size=2
        )


def test_jobs_of_open_mpi_meet_at_ports_of_their_own():
    ranks = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    names = [str(family * 2**16 + 1) for family in range(1000, 1100)]  # as version 4 calls jobs
    names += [f"prterun-node3-{pid}@1" for pid in range(1000, 1100)]  # and version 5
    for some in (names[:100], names[100:]):
        environs = [{**ranks, "PMIX_NAMESPACE": name} for name in some]
        found = [rendezvous(environ, detect(environ)) for environ in environs]
        assert len({one.port for one in found}) == 100
        assert all(one.address == "127.0.0.1" and 15000 <= one.port < 30000 for one in found)
    assert rendezvous(ranks, detect(ranks)).port == 29500


def test_a_first_host_that_does_not_resolve_is_named_unless_the_address_is_given():
    step = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "no-host[1-2].invalid",
    }
    with pytest.raises(SettingsError, match=r"'no-host1\.invalid'.*rank 1.*MASTER_ADDR"):
        check_first_host(step, detect(step))
    with patch_environment(**step), pytest.raises(SettingsError, match="cannot resolve"):
        PartialState(cpu=True)
    check_first_host({**step, "MASTER_ADDR": "no-host1.invalid"}, detect(step))
    check_first_host({**step, "SLURM_STEP_NODELIST": "localhost"}, detect(step))
    check_first_host({"RANK": "0", "WORLD_SIZE": "2"}, detect({"RANK": "0", "WORLD_SIZE": "2"}))


@pytest.mark.parametrize(
    ("variables", "interface"),
    [
        ({}, None),
        ({"NCCL_SOCKET_IFNAME": "eth"}, "eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth1"}, "eth1"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, None),
        ({"NCCL_SOCKET_IFNAME": "ib,eth1"}, "ib0"),
        ({"NCCL_SOCKET_IFNAME": "^lo"}, None),
        ({"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "ib0"}, None),
    ],
)
def test_gloo_uses_the_interface_of_nccl_unless_it_has_its_own(monkeypatch, variables, interface):
    names = ["lo", "ib0", "eth0", "eth1"]
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(names, 1)))
    assert gloo_interface(variables) == interface
    assert gloo_variables(variables, 2).get("GLOO_SOCKET_IFNAME") == interface


def test_what_the_user_tells_gloo_stays():
    variables = {"GLOO_ENABLE_STORE_V2_API": "0", "TORCH_GLOO_LAZY_INIT": "0"}
    assert gloo_variables(variables, 1024) == {}
