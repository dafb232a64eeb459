"""Jobs for a cluster of Ray, without a cluster: what is asked for, where ranks are, what an actor runs."""

from __future__ import annotations

import signal
import sys

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.arguments import read_arguments
from accel_cli.launch import launchers, ray
from accel_cli.launch.command import make_plan
from accel_cli.launch.hosts import HostDevices
from accel_cli.main import main
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings import merge_layers
from accel_state.topology import detect


def plan_of(*line, environ=None):
    read = read_arguments(["--launcher", "ray", *line, "train.py", "--lr", "a b"])
    merged = merge_layers(read.sourced)
    return make_plan(merged, read.script, read.script_arguments, environ or {}, HostDevices(gpus=0, cores=4))


def test_a_job_has_a_bundle_for_each_node():
    line = ["--num_machines", "2", "--gpus_per_node", "8", "--ray_strategy", "strict_spread"]
    assert ray.job_of(plan_of(*line, "--max_restarts", "3")) == {
        "address": "auto",
        "strategy": "STRICT_SPREAD",
        "bundles": [{"CPU": 8, "GPU": 8}] * 2,
        "ranks_per_bundle": 8,
        "max_restarts": 3,
        "grace": 30,
        "threads": None,
        "command": ["accel_cli.launch.worker", "--aloud", "train.py", "--lr", "a b"],
    }
    job = ray.job_of(plan_of("--num_processes", "2", "--ray_address", "head:6379", "--shutdown_timeout", "5"))
    assert (job["bundles"], job["address"], job["grace"]) == ([{"CPU": 2}], "head:6379", 5)


def test_a_dry_run_prints_the_job_and_needs_no_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "train.py").write_text("")
    line = ["--launcher", "ray", "--mixed_precision", "bf16", "--nodes", "2", str(tmp_path / "train.py")]
    assert main(["launch", "--dry_run", *line]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["bundles"] == [{"CPU": 1}, {"CPU": 1}]
    assert shown["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert main(["launch", "--explain", *line]) == 0
    assert "way: an actor of Ray runs each process" in capsys.readouterr().out


def test_without_ray_one_sentence_names_the_extra(monkeypatch):
    monkeypatch.setattr(launchers, "find_spec", lambda _: None)
    plan = plan_of()
    with pytest.raises(MissingDependencyError, match=r"needs Ray, .*`pip install 'accel-cli\[ray\]'`"):
        plan.launcher.check(plan)


def test_what_other_launchers_read_is_refused():
    with pytest.raises(SettingsError, match="argument --rdzv_backend, argument --tee are not supported"):
        ray.job_of(plan_of("--tee", "3", "--rdzv_backend", "c10d"))
    with pytest.raises(SettingsError, match="--time only applies to cluster jobs: add --launcher slurm"):
        plan_of("--time", "5")
    read = read_arguments(["--ray_strategy", "SPREAD", "train.py"])
    with pytest.raises(SettingsError, match=r"--ray_strategy only applies .*: add --launcher ray"):
        make_plan(merge_layers(read.sourced), "train.py", (), {}, HostDevices(gpus=0, cores=4))


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9))
def test_ranks_of_a_node_follow_each_other_and_share_its_devices(nodes):
    locations = [
        ray.Location(node=node, address=f"10.0.0.{ord(node)}", port=1000 + i, cores=8, gpus=(str(i),))
        for i, node in enumerate(nodes)
    ]
    order = ray.order_ranks(locations)
    assert sorted(order) == list(range(len(nodes)))
    placed = [locations[index] for index in order]
    environs = ray.rank_environs(placed, 2)
    for rank, (place, environ) in enumerate(zip(placed, environs, strict=True)):
        topology = detect(environ)
        assert (topology.rank, topology.world_size) == (rank, len(nodes))
        assert topology.local_world_size == nodes.count(place.node)
        assert placed[rank - topology.local_rank].node == place.node
        # The local rank is the number of the device that Ray gave to this very actor.
        assert environ["CUDA_VISIBLE_DEVICES"].split(",")[topology.local_rank] == place.gpus[0]
        assert environ["MASTER_PORT"] == str(placed[0].port)
        assert environ["TORCHELASTIC_RESTART_COUNT"] == "2"


SCRIPT = """\
import os, signal, sys, time
print("out", os.environ["WORD"], os.getcwd(), sys.argv[1:])
print("err", file=sys.stderr)
print("bar 1", end="\\r")
print("no end", end="", flush=True)
if sys.argv[1:] == ["wait"]:
    time.sleep(600)
sys.exit(5)
"""


def output_of(actor):
    streams, code = {1: b"", 2: b""}, None
    while code is None:
        lines, code = actor.read()
        for number, text in lines:
            streams[number] += text
    return streams, code


@pytest.mark.parametrize(("words", "number", "code"), [([], None, 5), (["wait"], signal.SIGTERM, -15)])
def test_an_actor_hands_over_output_and_exit_code_of_its_process(tmp_path, words, number, code):
    (tmp_path / "script.py").write_text(SCRIPT)
    actor = ray.Rank()
    command = ["accel_cli.launch.worker", "--aloud", "script.py", *words]
    actor.start(command, {"WORD": "a", "PYTHONUNBUFFERED": "1"}, str(tmp_path))
    if number is not None:
        actor.read()  # The script is at work.
        actor.signal(number)
    streams, ended = output_of(actor)
    assert ended == code
    if number is None:
        assert streams == {1: f"out a {tmp_path} []\nbar 1\rno end\n".encode(), 2: b"err\n"}


def test_the_output_of_ranks_is_written_by_lines_with_their_names(capfd):
    ray._write([(1, b"a\nb\r"), (2, b"c\n")], "node 0 rank 1: ")
    assert capfd.readouterr() == ("node 0 rank 1: a\nnode 0 rank 1: b\r", "node 0 rank 1: c\n")
