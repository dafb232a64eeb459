from __future__ import annotations

import os
import subprocess
import sys
from shutil import which

import pytest

from accel_cli.commands import tpu
from accel_cli.commands.tpu import InstallationError, commands, has_tpu, install_xla
from accel_cli.main import main
from accel_state.errors import UnsupportedError

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
    result = subprocess.run(line, env=environ, capture_output=True, text=True, check=False)
    assert (result.returncode, "account" in result.stderr) == (1, True), "2 is for what it cannot read"


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
        ([*BASE, "--command", "a", "--command_file", "b"], ["mutually exclusive"]),
        ([*BASE, "--install_accelerate", "--accelerate_version", "; rm -rf /"], ["'; rm -rf /'", "latest"]),
    ],
)
def test_what_is_missing_is_reported(words, parts, capsys):
    assert main(words) == 2
    message = capsys.readouterr().err
    assert [part for part in parts if part not in message] == []


def test_without_the_program_nothing_is_run(monkeypatch, capsys):
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    assert main([*BASE[:-1], "--command", "ls"]) == 2
    assert "gcloud" in capsys.readouterr().err


def test_the_exit_code_is_that_of_the_program(monkeypatch):
    seen = []

    def run(line, check):
        seen.append(line)
        return tpu.subprocess.CompletedProcess(line, 7)

    monkeypatch.setattr("shutil.which", lambda name, path=None: "/bin/gcloud")
    monkeypatch.setattr(tpu.subprocess, "run", run)
    assert main([*BASE[:-1], "--command", "ls"]) == 7
    assert seen[0][:2] == ["/bin/gcloud", "compute"]


@pytest.fixture
def installer(monkeypatch):
    """Record the commands that run on a machine with a TPU and torch 2.9.1, and set how they end."""
    lines, outcome = [], {"returncode": 0, "stderr": ""}

    def fake(line, **options):
        assert options["capture_output"]
        lines.append(line)
        return subprocess.CompletedProcess(line, outcome["returncode"], "", outcome["stderr"])

    monkeypatch.setattr(tpu, "has_tpu", lambda *_: True)
    monkeypatch.setattr(tpu, "version", lambda _: "2.9.1+cpu")
    monkeypatch.setattr(tpu.subprocess, "run", fake)
    return lines, outcome


def test_torch_xla_fits_the_installed_torch(installer, caplog):
    with caplog.at_level("INFO"):
        install_xla()
    (line,) = installer[0]
    assert line[:4] == [sys.executable, "-m", "pip", "install"]
    assert line[4:6] == ["torch==2.9.1", "torch_xla[tpu]~=2.9.0"]
    assert "torch_xla[tpu]~=2.9.0" in caplog.text


def test_an_upgrade_leaves_the_versions_to_the_installer(installer):
    install_xla(upgrade=True)
    (line,) = installer[0]
    assert line[4:7] == ["--upgrade", "torch", "torch_xla[tpu]"]


def test_the_last_line_of_the_installer_is_reported(installer):
    installer[1].update(returncode=1, stderr="Looking\nERROR: No matching distribution\n")
    with pytest.raises(InstallationError, match=r"exit code 1: ERROR: No matching distribution"):
        install_xla()


@pytest.mark.parametrize("torch", ["", "nightly"])
def test_without_a_release_of_torch_nothing_can_fit(torch):
    with pytest.raises(InstallationError, match="upgrade=True"):
        commands(torch, upgrade=False)


def test_elsewhere_nothing_is_installed(monkeypatch):
    monkeypatch.setattr(tpu, "has_tpu", lambda *_: False)
    monkeypatch.setattr(tpu.subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
    with pytest.raises(UnsupportedError, match="Colab"):
        install_xla()


def test_colab_and_machines_with_a_tpu_are_recognised(tmp_path):
    assert not has_tpu({"PATH": "/bin"}, tmp_path)
    assert has_tpu({"COLAB_RELEASE_TAG": "release-colab"}, tmp_path)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio/vfio").touch()
    assert not has_tpu({}, tmp_path)
    (tmp_path / "vfio/0").touch()
    assert has_tpu({}, tmp_path)
