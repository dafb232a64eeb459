"""Jobs for a cluster of Ray, without a cluster: what is asked for, where ranks are, what an actor runs."""

from __future__ import annotations

import signal
import sys

import pytest
import yaml

from accel_cli.arguments import read_arguments
from accel_cli.launch import launchers, ray
from accel_cli.launch.command import make_plan
from accel_cli.launch.hosts import HostDevices
from accel_cli.main import main
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings import merge_layers


def plan_of(*line, environ=None):
    read = read_arguments(["--launcher", "ray", *line, "train.py", "--lr", "a b"])
    merged = merge_layers(read.settings)
    return make_plan(merged, read.script, read.script_arguments, environ or {}, HostDevices(gpus=0, cores=4))


def test_a_job_has_a_bundle_for_each_node_which_runs_the_command():
    line = ["--num_machines", "2", "--gpus_per_node", "8", "--ray_strategy", "strict_spread", "--tee", "3"]
    job = yaml.safe_load(ray.show(plan_of(*line, "--max_restarts", "3", "--mixed_precision", "bf16")))
    assert job == {
        "address": "auto",
        "strategy": "STRICT_SPREAD",
        "bundles": {"number": 2, "each": {"CPU": 8, "GPU": 8}},
        "max_restarts": 3,
        "command": [
            "accel", "launch", "--launcher=auto", "--tee=3", "--num_machines=2", "--num_processes=16", "--",
            "train.py", "--lr", "a b",
        ],
        "environment": {"ACCELERATE_MIXED_PRECISION": "bf16"},
    }  # fmt: skip
    job = yaml.safe_load(ray.show(plan_of("--num_processes", "2", "--ray_address", "head:6379")))
    assert (job["bundles"], job["address"]) == ({"number": 1, "each": {"CPU": 2}}, "head:6379")


def test_a_dry_run_prints_the_job_and_needs_no_ray(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "train.py").write_text("")
    line = ["--launcher", "ray", "--mixed_precision", "bf16", "--nodes", "2", str(tmp_path / "train.py")]
    assert main(["launch", "--dry_run", *line]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["bundles"] == {"number": 2, "each": {"CPU": 1}}
    assert shown["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert main(["launch", "--explain", *line]) == 0
    assert "way: an actor of Ray runs this command on each node" in capsys.readouterr().out


def test_without_ray_one_sentence_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(launchers, "find_spec", lambda _: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    plan = plan_of()
    with pytest.raises(MissingDependencyError, match=r"needs Ray, .*`pip install 'accel-cli\[ray\]'`"):
        plan.row.run(plan)


def test_what_describes_one_node_is_refused():
    with pytest.raises(SettingsError, match="argument --machine_rank, argument --gpu_ids are not supported"):
        ray.show(plan_of("--gpu_ids", "0", "--machine_rank", "0"))


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


@pytest.mark.parametrize(("words", "number", "code"), [([], None, 5), (["wait"], signal.SIGTERM, -15)])
def test_an_actor_hands_over_output_and_exit_code_of_its_process(tmp_path, words, number, code):
    (tmp_path / "script.py").write_text(SCRIPT)
    node = ray.Node()
    line = [sys.executable, "script.py", *words]
    node.start(line, {"WORD": "a", "PYTHONUNBUFFERED": "1"}, str(tmp_path))
    output, ended = b"", None
    while ended is None:
        text, ended = node.read()
        output += text
        if number is not None:
            node.signal(number)
    assert ended == code
    if number is None:
        assert output == f"out a {tmp_path} []\nerr\nbar 1\rno end\n".encode()
