"""Every tracker writes what its library reads, also before a kill, and its run goes on afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_state.libraries import is_installed
from accel_trackers.registry import VENDORS
from harness import cases, chosen_params
from harness.programs import Program, run_programs
from trackers.library_cases import CASES, OFFLINE

FOLDER = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from trackers import library_cases
library_cases.main({name!r}, {checks})
"""
ALL = """
import sys
sys.path.insert(0, {folder!r})
from trackers import library_cases
library_cases.check_all()
"""
INSTALLED = [name for name in CASES if is_installed(name)]


ALWAYS_KILLED = {"tensorboard", "wandb"}
"""One writes by itself, one in a process of its own; the others are killed with --all."""


@pytest.fixture(scope="module")
def ends(tmp_path_factory, request):
    """How each library's program ended, and how its chosen checks did; all run at the same time."""
    programs = {}
    for name in INSTALLED:
        chosen = [params["check"] for params in chosen_params(request) if params["name"] == name]
        if chosen:
            checks = ", ".join(f"library_cases.{check}" for check in chosen)
            source = PROGRAM.format(folder=str(FOLDER), name=name, checks=checks)
            programs[name] = Program(source, world_size=1, variables=OFFLINE)
    if any(item.name == "test_all_libraries_log_in_one_process" for item in request.session.items):
        variables = OFFLINE | {"ACCELERATE_USE_CPU": "true"}
        programs["all"] = Program(ALL.format(folder=str(FOLDER)), world_size=1, variables=variables)
    imports = ("accel_train", "accel_trackers.testing", "torch.utils.tensorboard")
    return run_programs(programs, tmp_path_factory.mktemp("run"), imports)


def test_there_is_a_case_for_every_library():
    assert {*CASES} == {*VENDORS}


def assert_succeeded(ends, name, check):
    if name not in INSTALLED:
        pytest.skip(f"{name} is not installed: it has no release for this version of Python")
    (end,) = ends[name]
    assert end.code == 0, f"{end.output}\n{end.errors}"
    assert json.loads(end.output.splitlines()[-1])[check] == 0, f"{end.output}\n{end.errors}"


@pytest.mark.thorough
@pytest.mark.parametrize("check", ["check_conformance"])
@pytest.mark.parametrize("name", sorted(CASES))
def test_what_was_written_is_what_the_library_reads(ends, name, check):
    assert_succeeded(ends, name, check)


@pytest.mark.parametrize("check", ["check_kill"])
@pytest.mark.parametrize("name", cases(sorted(CASES), always=ALWAYS_KILLED))
def test_what_was_logged_survives_a_kill_and_the_run_goes_on_under_its_id(ends, name, check):
    assert_succeeded(ends, name, check)


@pytest.mark.thorough
@pytest.mark.parametrize("check", ["check_changed_config"])
@pytest.mark.parametrize("name", ["mlflow"])
def test_a_run_goes_on_with_another_configuration(ends, name, check):
    assert_succeeded(ends, name, check)


@pytest.mark.thorough
@pytest.mark.skipif(len(INSTALLED) < len(CASES), reason="not every library has a release for this Python")
def test_all_libraries_log_in_one_process(ends):
    (end,) = ends["all"]
    assert end.code == 0, f"{end.output}\n{end.errors}"
    (read,) = (line for line in end.output.splitlines() if line.startswith('{"'))
    assert json.loads(read) == dict.fromkeys(CASES, True), f"{end.output}\n{end.errors}"
