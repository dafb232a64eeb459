"""Replica groups, without torchft: what each group runs, and which are started again."""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

import pytest

from accel_cli.arguments import read_arguments
from accel_cli.launch import launchers
from accel_cli.launch.command import LaunchPlan, make_plan
from accel_cli.launch.hosts import HostDevices
from accel_cli.launch.launchers import command_of_plan
from accel_cli.launch.replicas import ReplicaJob
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings import merge_layers


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def plan_of(*line: str, gpus: int = 0) -> LaunchPlan:
    read = read_arguments(["--replica_groups", "2", *line, "train.py", "--lr", "1"])
    merged = merge_layers(read.sourced)
    return make_plan(merged, read.script, read.script_arguments, {}, HostDevices(gpus=gpus, cores=4))


def job_of(*line: str, gpus: int = 0) -> dict[str, Any]:
    command = command_of_plan(plan_of(*line, gpus=gpus)).command
    assert command[1:3] == ("-m", "accel_cli.launch.replicas")
    return json.loads(command[3])


def test_groups_share_the_processes_and_the_devices():
    job = job_of("--num_processes", "4", gpus=4)
    assert job["groups"] == 2
    assert job["devices"] == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    assert "--nproc_per_node=2" in job["command"]
    assert job["command"][-3:] == ["train.py", "--lr", "1"]
    job = job_of("--cpu", "--max_restarts", "7", "--min_replica_groups", "2", "--replica_timeout", "9")
    assert job["devices"] == [{}, {}]
    assert "--nproc_per_node=1" in job["command"]
    assert (job["max_restarts"], job["min_groups"], job["timeout"]) == (7, 2, 9)
    assert not [word for word in job["command"] if "max_restarts" in word], "the agents restart nothing"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--cpu", "--num_processes", "3"], "num_processes is 3.*multiple"),
        (["--cpu", "--min_replica_groups", "3"], "min_replica_groups is 3, more than"),
        (["--cpu", "--num_machines", "2", "--num_processes", "2"], "only on this machine"),
    ],
)
def test_what_cannot_be_started_is_refused(line, message):
    with pytest.raises(SettingsError, match=message):
        command_of_plan(plan_of(*line, "--main_process_ip", "127.0.0.1", "--main_process_port", "29511"))


def test_without_torchft_one_sentence_names_the_extra(monkeypatch):
    plan = plan_of("--cpu")
    monkeypatch.setattr(launchers, "find_spec", lambda _: None)
    assert plan.launcher.check is not None
    with pytest.raises(MissingDependencyError, match=r"accel-plugins\[torchft\]"):
        plan.launcher.check(plan)


def job(tmp_path, monkeypatch, source: str, **more: Any) -> ReplicaJob:
    """A job whose groups are a program that imports nothing."""
    (tmp_path / "accel_cli_stand_in.py").write_text(source)
    facts = {"groups": 2, "min_groups": 1, "max_restarts": 1, "grace": 5, "devices": [{}, {}], **more}
    made = ReplicaJob({**facts, "command": []}, "http://127.0.0.1:1")
    monkeypatch.setattr(made, "line", [sys.executable, str(tmp_path / "accel_cli_stand_in.py")])
    return made


def test_a_failed_group_starts_again_with_its_number(tmp_path, monkeypatch, capfd):
    source = """
import os, sys
group, life = os.environ["REPLICA_GROUP_ID"], int(os.environ["ACCELERATE_REPLICA_RESTARTS"])
assert os.environ["NUM_REPLICA_GROUPS"] == "2" and os.environ["TORCHFT_LIGHTHOUSE"]
os.write(1, f"group {group} life {life}\\n".encode())  # at once, beside the other group
import time; time.sleep(0.5 if group == "0" or life else 0)
sys.exit(9 if group == "1" and not life else 0)
"""
    handler = signal.getsignal(signal.SIGTERM)
    assert job(tmp_path, monkeypatch, source).run() == 0
    assert signal.getsignal(signal.SIGTERM) == handler
    told = capfd.readouterr()
    assert sorted(told.out.split("\n")) == ["", "group 0 life 0", "group 1 life 0", "group 1 life 1"]
    assert "replica group 1 ended with 9 and is restarting: restart 1 of 1" in told.err


def test_too_few_groups_end_the_job_with_the_code_of_the_last(tmp_path, monkeypatch, capfd):
    source = """
import os, sys, time
if os.environ["REPLICA_GROUP_ID"] == "0":
    time.sleep(60)
sys.exit(9)
"""
    began = time.monotonic()
    assert job(tmp_path, monkeypatch, source, min_groups=2).run() == 9
    assert time.monotonic() - began < 30, "the other group is ended"
    assert "replica group 1 ended with 9 and is not restarted" in capfd.readouterr().err
