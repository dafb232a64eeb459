from __future__ import annotations

import subprocess
import sys

import pytest

from accel_cli.commands import tpu as place
from accel_cli.commands.tpu import InstallationError, commands, has_tpu, install_xla
from accel_state.errors import UnsupportedError


@pytest.fixture
def run(monkeypatch):
    """What was run, on a machine with a TPU and torch 2.9.1; and how it ends."""
    lines, ending = [], {"returncode": 0, "stderr": ""}

    def fake(line, **options):
        assert options["capture_output"]
        lines.append(line)
        return subprocess.CompletedProcess(line, ending["returncode"], "", ending["stderr"])

    monkeypatch.setattr(place, "has_tpu", lambda *_: True)
    monkeypatch.setattr(place, "_installed", lambda _: "2.9.1+cpu")
    monkeypatch.setattr(place.subprocess, "run", fake)
    return lines, ending


def test_what_is_installed_fits_the_torch_that_is_there(run, caplog):
    with caplog.at_level("INFO"):
        install_xla()
    (line,) = run[0]
    assert line[:4] == [sys.executable, "-m", "pip", "install"]
    assert line[4:6] == ["torch==2.9.1", "torch_xla[tpu]~=2.9.0"]
    assert "torch_xla[tpu]~=2.9.0" in caplog.text


def test_an_upgrade_leaves_the_versions_to_the_installer(run):
    install_xla(upgrade=True)
    (line,) = run[0]
    assert line[4:7] == ["--upgrade", "torch", "torch_xla[tpu]"]


def test_what_the_installer_says_last_is_reported(run):
    run[1].update(returncode=1, stderr="Looking\nERROR: No matching distribution\n")
    with pytest.raises(InstallationError, match=r"exit code 1: ERROR: No matching distribution"):
        install_xla()


@pytest.mark.parametrize("torch", [None, "nightly"])
def test_without_a_release_of_torch_nothing_can_fit(torch):
    with pytest.raises(InstallationError, match="upgrade=True"):
        commands(torch, upgrade=False)


def test_elsewhere_nothing_is_installed(monkeypatch):
    monkeypatch.setattr(place, "has_tpu", lambda *_: False)
    monkeypatch.setattr(place.subprocess, "run", lambda *_, **__: pytest.fail("something was run"))
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
