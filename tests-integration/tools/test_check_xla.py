"""tools/check_xla.py skips the tests of XLA devices, and says why, where torch_xla cannot be installed."""

from __future__ import annotations

import os
import stat
import sys

import pytest

import check_xla


@pytest.fixture
def broken_uv(tmp_path, monkeypatch):
    program = tmp_path / "uv"
    program.write_text("#!/bin/sh\necho 'torch-xla has no wheel for this platform' >&2\nexit 2\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("UV", str(program))


@pytest.mark.usefixtures("broken_uv")
def test_what_the_installer_said_is_the_reason(capsys):
    assert check_xla.main([]) == 0
    said = capsys.readouterr().out
    assert "cannot be installed here" in said
    assert "torch-xla has no wheel for this platform" in said
    assert said.endswith("1 skipped in 0.00s\n")


def test_an_installation_that_succeeds_has_no_reason():
    assert check_xla.failure_of([sys.executable, "-c", "pass"], dict(os.environ)) is None


def test_an_installation_that_takes_too_long_is_ended(monkeypatch):
    monkeypatch.setattr(check_xla, "INSTALL_SECONDS", 0)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert check_xla.failure_of(sleeper, dict(os.environ)) == "It was not installed after 0 s."
