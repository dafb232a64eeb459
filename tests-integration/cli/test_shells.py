"""Completion in the shells themselves, where they are installed."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pexpect
import pytest

OFFERED = [
    ("accel la", "launch"),
    ("accel launch --num_p", "--num_processes"),
    ("accel launch --mixed_precision b", "bf16"),
    ("accel env --js", "--json"),
]


@pytest.fixture
def script(tmp_path):
    def write(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        line = [sys.executable, "-m", "accel_cli", "completion", shell]
        path = tmp_path / f"accel.{shell}"
        path.write_text(subprocess.run(line, capture_output=True, text=True, check=True).stdout)
        return path

    return write


def test_fish_offers_what_can_be_written_there(script, tmp_path):
    path = script("fish")
    for words, wanted in OFFERED:
        line = ["fish", "-N", "-c", f"source {path}; complete -C {words!r}"]
        told = subprocess.run(
            line,
            capture_output=True,
            text=True,
            check=True,
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        )
        assert [one.split("\t")[0] for one in told.stdout.splitlines()] == [wanted]
        assert told.stderr == ""


def test_zsh_completes_what_can_be_written_there(script, tmp_path):
    environ = {"TERM": "dumb", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    path = script("zsh")
    terminal = pexpect.spawn(
        "zsh", ["-f", "-i"], encoding="utf-8", dimensions=(50, 200), timeout=None, env=environ
    )
    terminal.sendline(
        "unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -D;"
        f" eval \"$(cat {path})\"; print LOA''DED"
    )
    terminal.expect_exact("LOADED")
    for words, wanted in OFFERED:
        terminal.send(words + "\t")
        terminal.expect_exact(wanted)
        terminal.send("\x15")
    terminal.close()
