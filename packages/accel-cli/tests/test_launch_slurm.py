"""The batch script of a job of Slurm, without Slurm: what it asks for, and that words stay words."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.arguments import read_arguments
from accel_cli.launch import slurm
from accel_cli.launch.command import make_plan
from accel_cli.launch.hosts import HostDevices
from accel_cli.main import main
from accel_state.errors import SettingsError
from accel_state.settings import merge_layers, parse_environ, parse_file


def script_of(*line, script="train.py", words=(), environ=None):
    read = read_arguments(["--launcher", "slurm", *line, script, *words])
    merged = merge_layers(read.settings)
    plan = make_plan(merged, read.script, read.script_arguments, environ or {}, HostDevices(gpus=0, cores=4))
    return slurm.show(plan)


def directives(text):
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_a_job_asks_for_its_nodes_and_runs_one_command_on_each():
    text = script_of("--nodes", "2", "--gpus_per_node", "8", "--time", "1:00:00", "--mixed_precision", "bf16")
    assert directives(text) == [
        "--job-name=train", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8", "--time=1:00:00",
        "--output=slurm-%j.out", "--open-mode=append", "--no-requeue",
    ]  # fmt: skip
    step = next(line for line in text.splitlines() if line.startswith("srun "))
    assert shlex.split(step) == [
        "srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--label",
        sys.executable, "-m", "accel_cli", "launch", "--launcher=auto",
        "--num_machines=2", "--num_processes=16", "--", "train.py",
    ]  # fmt: skip
    assert "\nexport ACCELERATE_MIXED_PRECISION=bf16\n" in text


def test_a_job_that_is_started_again_gets_the_time_to_save():
    text = script_of("--max_restarts", "3", "--cpu")
    assert directives(text)[-2:] == ["--requeue", "--signal=TERM@120"]
    assert '[ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]' in text
    assert "--launcher=auto --shutdown_timeout=110 " in text


def test_options_of_sbatch_come_last_and_are_checked():
    text = script_of("--sbatch_args", "--partition=a --comment 'b c'", "--sbatch_args=--no-requeue")
    assert directives(text)[-2:] == ["--partition=a --comment 'b c'", "--no-requeue"]
    for bad in ("evil", "--comment 'x", "--comment=x\n#SBATCH --uid=root", " "):
        with pytest.raises(SettingsError, match="argument --sbatch_args is"):
            script_of(f"--sbatch_args={bad}")


@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1), max_size=4))
def test_words_of_the_script_reach_it_unchanged(words):
    text = "srun() { printf '%s\\0' \"$@\"; }\n" + script_of(words=words, script="a b;$(id).py")
    done = subprocess.run(["bash"], input=text.encode(), capture_output=True, check=True)
    *passed, end = done.stdout.decode().split("\0")
    assert (passed[-len(words) - 2 :], end) == (["--", "a b;$(id).py", *words], "")


def test_settings_reach_the_nodes_as_they_were_given():
    line = ["--use_fsdp", "--fsdp_version=2", "--no_debug", "-m", "--tee", "3", "--num_processes", "2"]
    file = {"debug": True, "gradient_accumulation_steps": 4, "role": "trainer", "launcher": "slurm"}
    read = read_arguments([*line, "pkg"])
    merged = merge_layers(read.settings, parse_file(file, "run.yaml"))
    text = slurm.show(make_plan(merged, "pkg", (), {}, HostDevices(gpus=0, cores=4)))
    exports = shlex.split(text.partition("\nsrun ")[0], comments=True)
    variables = dict(word.split("=", 1) for word in exports if "=" in word and word[0] != "-")
    step = next(row for row in text.splitlines() if row.startswith("srun "))
    words = shlex.split(step)
    again = read_arguments(words[words.index("launch") + 1 :])
    on_node = merge_layers(again.settings, parse_environ(variables), parse_file(file, "run.yaml")).settings
    assert (on_node.fsdp.fsdp_version, on_node.training.gradient_accumulation_steps) == (2, 4)
    assert not on_node.process.debug, "also where the node has the file"
    launch = on_node.launch
    assert (launch.tee, launch.role, launch.num_processes, launch.launcher) == ("3", "trainer", 2, "auto")
    assert (again.script, launch.module) == ("pkg", True)


def test_jobs_that_cannot_be_are_refused():
    with pytest.raises(SettingsError, match="3 processes, which cannot be divided by 2 nodes"):
        script_of("--nodes", "2", "--num_processes", "3")
    with pytest.raises(
        SettingsError, match="4 processes on each node, but argument --gpus_per_node requests 2"
    ):
        script_of("--num_processes", "4", "--gpus_per_node", "2")
    with pytest.raises(SettingsError, match=r"--time is 'soon': expected minutes"):
        script_of("--time", "soon")


def test_a_dry_run_prints_the_script_and_needs_no_slurm(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    line = ["--launcher", "slurm", "--nodes", "2", str(tmp_path / "train.py")]
    assert main(["launch", "--dry_run", *line]) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n#SBATCH --job-name=train\n#SBATCH --nodes=2\n")
    assert main(["launch", *line]) == 2
    assert "sbatch, which is not on the PATH" in capsys.readouterr().err


def test_a_dry_run_of_a_local_launch_prints_its_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert main(["launch", "--cpu", "--dry_run", "train.py", "a b"]) == 0
    assert capsys.readouterr().out == f"{sys.executable} train.py 'a b'\n"
