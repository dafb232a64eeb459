"""The picture of the learning rates shows what the library does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "packages/accel-suite/docs"
RUN = "import runpy, sys, torch._dynamo; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
"""Runs a script whose processes, forked from it, need not import torch's compiler one by one."""


@pytest.mark.thorough
def test_the_curves_of_the_page_are_those_of_the_library(tmp_path):
    drawn = tmp_path / "schedules.svg"
    command = [sys.executable, "-c", RUN, DOCS / "src/schedule_clocks.py", drawn]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert drawn.read_text() == (DOCS / "guides/schedules.svg").read_text()
