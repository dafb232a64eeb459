"""Every tracker writes what its library reads: the conformance suite, each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_state.available import is_installed
from accel_trackers.vendor import VENDORS
from harness.programs import Program, run_programs
from tracking.library_cases import CASES, OFFLINE

FOLDER = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from tracking import library_cases
library_cases.main({name!r})
"""
INSTALLED = [name for name in CASES if is_installed(VENDORS[name].installed)]


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """How each library's program ended; all run at the same time."""
    programs = {
        name: Program(PROGRAM.format(folder=str(FOLDER), name=name), world_size=1, variables=OFFLINE)
        for name in INSTALLED
    }
    return {name: ended[0] for name, ended in run_programs(programs, tmp_path_factory.mktemp("run")).items()}


def test_there_is_a_case_for_every_library():
    assert {*CASES} == {*VENDORS}


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_was_written_is_what_the_library_reads(ends, name):
    if name not in INSTALLED:
        pytest.skip(f"{name} is not installed: it has no release for this version of Python")
    assert ends[name].code == 0, f"{ends[name].output}\n{ends[name].errors}"
