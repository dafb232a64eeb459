"""Hostfiles and their filters; the devices of this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.launch import hosts
from accel_cli.launch.hosts import filter_hosts, mpi_machines, parse_hosts, read_hosts
from accel_state.errors import SettingsError

names = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
machines = st.dictionaries(names, st.integers(1, 8), min_size=1, max_size=5)


@given(machines)
def test_a_hostfile_is_read_as_it_was_written(machines):
    lines = ["# machines", "", *(f"{name}  slots={slots}  # fast" for name, slots in machines.items())]
    assert parse_hosts(lines, "hosts") == machines


def test_gpus_of_the_host_that_a_container_lacks_are_not_counted(tmp_path):
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, simds in enumerate((0, 304, 304)):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simds}\n")
    (nodes / "3" / "properties").mkdir(parents=True)  # cannot be read, as one that is not the container's
    for devices in range(3):
        assert hosts._count_amd_gpus(tmp_path) == devices
        (tmp_path / "dev/dri").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"dev/dri/renderD{128 + devices}").touch()


@given(machines, st.data())
def test_a_filter_chooses_exactly_the_slots_that_it_names(machines, data):
    chosen = {
        name: data.draw(st.sets(st.sampled_from(range(slots)), min_size=1))
        for name, slots in machines.items()
        if data.draw(st.booleans())
    }
    text = "@".join(f"{name}:{','.join(map(str, slots))}" for name, slots in chosen.items())
    if chosen:
        assert filter_hosts(machines, inclusion=text) == {name: len(slots) for name, slots in chosen.items()}
    left = {name: slots - len(chosen.get(name, ())) for name, slots in machines.items()}
    left = {name: slots for name, slots in left.items() if slots}
    if left:
        assert filter_hosts(machines, exclusion=text or None) == left
    else:
        with pytest.raises(SettingsError, match="exclude all machines"):
            filter_hosts(machines, exclusion=text)


def test_a_machine_without_slots_is_meant_whole():
    assert filter_hosts({"a": 4, "b": 2}, inclusion="a") == {"a": 4}
    assert filter_hosts({"a": 4, "b": 2}, exclusion="a") == {"b": 2}


@pytest.mark.parametrize(
    ("lines", "parts"),
    [
        (["worker-1 slots=four"], ["line 1", "'worker-1 slots=four'", "slots=<number>"]),
        (["a slots=1", "worker-1"], ["line 2", "slots=<number>"]),
        (["a slots=1", "", "a slots=2"], ["line 3", "already listed"]),
        (["# nothing"], ["names no machine"]),
    ],
)
def test_a_hostfile_that_cannot_be_read_names_the_line(lines, parts):
    with pytest.raises(SettingsError) as caught:
        parse_hosts(lines, "hosts")
    assert [part for part in [*parts, "'hosts'"] if part not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [("c", ["'c'", "a, b"]), ("a:x", ["'x'"])],
)
def test_a_filter_that_does_not_fit_says_why(text, parts):
    with pytest.raises(SettingsError) as caught:
        filter_hosts({"a": 4, "b": 2}, inclusion=text)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_hostfile_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match="'nowhere' cannot be read"):
        read_hosts("nowhere")
    (tmp_path / "empty").write_text("# none\n")
    with pytest.raises(SettingsError, match="names no machine"):
        mpi_machines(str(tmp_path / "empty"))


def test_the_mpi_machines_of_an_mpi_hostfile_is_found_in_every_form(tmp_path):
    for text in ("n1 slots=2\nn2\n", "# all\n\nn1:2\nn2:2\n", "n1\n"):
        (tmp_path / "hosts").write_text(text)
        assert mpi_machines(str(tmp_path / "hosts"))[0] == "n1"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, 8),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0, 3"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,3"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937,MIG-5c89852c"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7,8,9"}, 8),
        ({"HIP_VISIBLE_DEVICES": "0,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2", "ROCR_VISIBLE_DEVICES": "0"}, 1),
    ],
)
def test_the_environment_narrows_the_choice_of_gpus(environ, expected):
    assert hosts.count_gpus(environ, 8) == expected


def test_this_machine_has_cores_and_no_hidden_gpus():
    found = hosts.probe_devices({"CUDA_VISIBLE_DEVICES": ""})
    assert found.cores >= 1
    assert found.gpus == 0


def test_each_label_of_several_devices_restricts_them_by_its_own_variable():
    assert hosts.VISIBLE_DEVICES == {
        "MULTI_GPU": "CUDA_VISIBLE_DEVICES",
        "MULTI_XPU": "ZE_AFFINITY_MASK",
        "MULTI_NPU": "ASCEND_RT_VISIBLE_DEVICES",
        "MULTI_MLU": "MLU_VISIBLE_DEVICES",
        "MULTI_SDAA": "SDAA_VISIBLE_DEVICES",
        "MULTI_MUSA": "MUSA_VISIBLE_DEVICES",
        "MULTI_HPU": "HABANA_VISIBLE_MODULES",
        "MULTI_NEURON": "NEURON_RT_VISIBLE_CORES",
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "1600000 100000\n"}, 16),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_a_container_has_the_cores_of_its_quota(tmp_path, files, expected):
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert hosts.cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NoDevFiles", 0),
        ("0,9", 1),
        ("9", 0),
        ("", 0),
        ("-1", 0),
        ("2,-1,0", 1),
        ("GPU-5ef1,MIG-07", 2),
        ("0, 1", 2),
    ],
)
def test_the_driver_reads_visible_devices_up_to_the_first_invalid_one(text, expected):
    assert hosts.count_gpus({"CUDA_VISIBLE_DEVICES": text}, 4) == expected


PLUGIN = """\
import os, sys, types
import torch
torch.utils.rename_privateuse1_backend("npu")
module = types.ModuleType("torch.npu")
module.is_available = lambda: True
module.device_count = lambda: 2 if "ASCEND_RT_VISIBLE_DEVICES" not in os.environ else 0
module.current_device = lambda: 0
module._is_in_bad_fork = lambda: False
torch._register_device_module("npu", module)
print("a plugin that talks")
"""


def test_devices_that_only_torch_knows_are_counted_and_chosen(tmp_path):
    (tmp_path / "torch_npu.py").write_text(PLUGIN)
    (tmp_path / "train.py").touch()
    environ = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }

    def accel(*words, **variables):
        line = [sys.executable, "-m", "accel_cli", *words]
        return subprocess.run(
            line, env={**environ, **variables}, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    if hosts.probe_devices({}, ask_torch=False).installed:
        pytest.skip("this machine has a GPU")
    assert "--nproc_per_node=2" in accel("launch", "--explain", "train.py")
    assert "--nproc_per_node" not in accel("launch", "--explain", "train.py", ASCEND_RT_VISIBLE_DEVICES="1")
    accel("config", "default", "--config_file", "made.yaml")
    made = yaml.safe_load((tmp_path / "made.yaml").read_text())
    assert (made["distributed_type"], made["num_processes"], made["use_cpu"]) == ("MULTI_NPU", 2, False)
