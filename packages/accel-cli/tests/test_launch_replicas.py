"""Replica groups, without torchft: what each group runs, and which are started again."""

from __future__ import annotations

import signal
import sys

import pytest

from accel_cli.arguments import read_arguments
from accel_cli.launch import launchers
from accel_cli.launch.command import make_plan
from accel_cli.launch.hosts import HostDevices
from accel_cli.launch.plan import LaunchPlan
from accel_cli.launch.replicas import ReplicaJob, group_words, visible_devices
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings import merge_layers


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def plan_of(*line: str, gpus: int = 0) -> LaunchPlan:
    read = read_arguments(["--replica_groups", "2", *line, "train.py", "--lr", "1"])
    merged = merge_layers(read.settings)
    return make_plan(merged, read.script, read.script_arguments, {}, HostDevices(gpus=gpus, cores=4))


def test_groups_share_the_processes_and_the_devices():
    plan = plan_of("--num_processes", "4", "--max_restarts", "7", gpus=4)
    assert visible_devices(plan) == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}]
    words = group_words(plan)
    assert "--nproc_per_node=2" in words
    assert words[-3:] == ["train.py", "--lr", "1"]
    assert not [word for word in words if "max_restarts" in word], "the agents restart nothing"
    plan = plan_of("--cpu")
    assert visible_devices(plan) == [{}, {}]
    assert "--nproc_per_node=1" in group_words(plan)


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
        group_words(plan_of(*line, "--main_process_ip", "127.0.0.1", "--main_process_port", "29511"))


def test_without_torchft_one_sentence_names_the_extra(monkeypatch):
    plan = plan_of("--cpu")
    monkeypatch.setattr(launchers, "find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"accel-plugins\[torchft\]"):
        plan.row.run(plan)


def job(tmp_path, source: str, *line: str) -> ReplicaJob:
    """A job whose groups are a program that imports nothing."""
    (tmp_path / "program.py").write_text(source)
    plan = plan_of("--cpu", "--max_restarts", "1", "--shutdown_timeout", "5", *line)
    return ReplicaJob(plan, [sys.executable, str(tmp_path / "program.py")], "http://127.0.0.1:1")


def test_a_failed_group_starts_again_with_its_number(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = """
import os, sys, time
group, life = os.environ["REPLICA_GROUP_ID"], int(os.environ["ACCELERATE_REPLICA_RESTARTS"])
assert os.environ["NUM_REPLICA_GROUPS"] == "2" and os.environ["TORCHFT_LIGHTHOUSE"]
os.write(1, f"group {group} life {life}\\n".encode())  # at once, beside the other group
if life:
    open("again", "w").close()
while group == "0" and not os.path.exists("again"):
    time.sleep(0.05)
sys.exit(9 if group == "1" and not life else 0)
"""
    handler = signal.getsignal(signal.SIGTERM)
    assert job(tmp_path, source).run() == 0
    assert signal.getsignal(signal.SIGTERM) == handler
    told = capfd.readouterr()
    assert sorted(told.out.split("\n")) == ["", "group 0 life 0", "group 1 life 0", "group 1 life 1"]
    assert "replica group 1 ended with 9 and is restarting: restart 1 of 1" in told.err


def test_too_few_groups_end_the_job_with_the_code_of_the_last(tmp_path, capfd):
    source = """
import os, sys, time
if os.environ["REPLICA_GROUP_ID"] == "0":
    time.sleep(100_000)  # ended by the launcher
sys.exit(9)
"""
    assert job(tmp_path, source, "--min_replica_groups", "2").run() == 9
    assert "replica group 1 ended with 9 and is not restarted" in capfd.readouterr().err
