from __future__ import annotations

import os
import subprocess
from shutil import which

import pytest

from accel_cli.commands import tpu
from accel_cli.main import main

BASE = ["tpu-config", "--tpu_name", "pod", "--tpu_zone", "us-central1-a", "--debug"]


@pytest.fixture(autouse=True)
def _no_config(monkeypatch, tmp_path):
    monkeypatch.setattr(tpu, "read", lambda: {"HF_HOME": str(tmp_path)})


def test_the_command_line_names_pod_zone_commands_and_all_workers(capsys):
    assert main([*BASE, "--command", "echo hello", "--command", "ls -l"]) == 0
    assert capsys.readouterr().out == (
        "Running gcloud compute tpus tpu-vm ssh pod --zone us-central1-a"
        " --command cd /usr/share; echo hello; ls -l --worker all\n"
    )


@pytest.mark.skipif(which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.parametrize("more", [[], ["--use_alpha"]])
def test_gcloud_reads_the_command_line(tmp_path, more):
    line = tpu.plan(name="pod", zone="us-central1-a", commands=["echo hello"], alpha=bool(more))
    environ = {**os.environ, "CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    told = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
    assert (told.returncode, "account" in told.stderr) == (1, True), "2 is for what it cannot read"


def test_the_pod_and_its_commands_may_be_in_the_config_file(capsys, tmp_path):
    config = tmp_path / "tpu.yaml"
    config.write_text("tpu_name: ours\ntpu_zone: here\ncommands: [date]\n")
    assert main(["tpu-config", "--config-file", str(config), "--debug", "--use_alpha"]) == 0
    assert capsys.readouterr().out == (
        "Running gcloud alpha compute tpus tpu-vm ssh ours --zone here --command cd /usr/share; date"
        " --worker all\n"
    )


def test_a_file_of_commands_is_read_without_comments_and_empty_lines(capsys, tmp_path):
    file = tmp_path / "commands"
    file.write_text("# first\necho a\n\necho b\n")
    assert main([*BASE, "--command_file", str(file)]) == 0
    assert "cd /usr/share; echo a; echo b --worker" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "line"),
    [("latest", "pip install accel-suite -U"), ("0.1.0", "pip install accel-suite==0.1.0")],
)
def test_accel_is_installed_first(version, line, capsys):
    assert main([*BASE, "--install_accelerate", "--accelerate_version", version, "--command", "ls"]) == 0
    assert f"cd /usr/share; {line}; ls" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["tpu-config", "--command", "ls"], ["--tpu_name"]),
        (["tpu-config", "--tpu_name", "pod", "--command", "ls"], ["--tpu_zone"]),
        (BASE, ["--command"]),
        (["tpu-config", "--tpu_name=--quiet", "--tpu_zone=a", "--command", "ls"], ["'--quiet'", "gcloud"]),
        ([*BASE, "--command_file", "/nowhere"], ["'/nowhere'"]),
        ([*BASE, "--command", "a", "--command_file", "b"], ["contradict"]),
        ([*BASE, "--install_accelerate", "--accelerate_version", "; rm -rf /"], ["'; rm -rf /'", "latest"]),
    ],
)
def test_what_is_missing_is_reported(words, parts, capsys):
    assert main(words) == 2
    message = capsys.readouterr().err
    assert [part for part in parts if part not in message] == []


def test_without_the_program_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr(tpu.shutil, "which", lambda _: None)
    assert main([*BASE[:-1], "--command", "ls"]) == 2
    assert "gcloud" in capsys.readouterr().err


def test_the_exit_code_is_that_of_the_program(monkeypatch):
    seen = []

    def run(line, check):
        seen.append(line)
        return tpu.subprocess.CompletedProcess(line, 7)

    monkeypatch.setattr(tpu.shutil, "which", lambda _: "/bin/gcloud")
    monkeypatch.setattr(tpu.subprocess, "run", run)
    assert main([*BASE[:-1], "--command", "ls"]) == 7
    assert seen[0][:2] == ["/bin/gcloud", "compute"]
