from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accel_cli.commands import selftest
from accel_cli.commands.selftest import (
    ABOUT,
    FAILED,
    PASSED,
    RUNNING,
    SKIPPED,
    advice,
    combine,
)
from accel_cli.commands.selftest_checks import CHECKS

STATES = (PASSED, FAILED, SKIPPED, RUNNING)


def report(rank, world_size, **states):
    checks = {
        name: {"result": state, "what": f"{name} {rank}", "seconds": 0.0} for name, state in states.items()
    }
    return {"rank": rank, "world_size": world_size, "facts": FACTS, "checks": checks, "speeds": {}}


def facts(**changes):
    return {"device type": "cuda", "threads": 1, "accelerators": "1 x cuda", **changes}


FACTS = facts(**{"device type": "cpu", "accelerators": "", "strategy": "NO", "mixed precision": "no"})


def test_each_check_has_its_advice():
    assert set(ABOUT) == set(CHECKS)


@pytest.mark.parametrize(
    ("states", "expected", "detail"),
    [
        ((PASSED, PASSED), PASSED, "a 0"),
        ((PASSED, FAILED), FAILED, "rank 1: a 1"),
        ((FAILED, FAILED), FAILED, "every rank: a 0"),
        ((PASSED, RUNNING), FAILED, "rank 1 did not finish"),
        ((SKIPPED, SKIPPED), SKIPPED, "a 0"),
    ],
)
def test_a_check_passes_if_it_passes_everywhere(states, expected, detail):
    check = combine([report(rank, 2, a=state) for rank, state in enumerate(states)])["a"]
    assert (check["result"], check["what"]) == (expected, detail)


@given(st.lists(st.lists(st.sampled_from(STATES), min_size=3, max_size=3), min_size=1, max_size=4))
def test_no_failure_is_lost(table):
    reports = [
        report(rank, len(table), **dict(zip("abc", states, strict=True))) for rank, states in enumerate(table)
    ]
    for name, check in combine(reports).items():
        states = {report["checks"][name]["result"] for report in reports}
        assert (check["result"] == FAILED) == bool(states & {FAILED, RUNNING})


@pytest.mark.parametrize(
    ("changes", "speeds", "part"),
    [
        ({"device type": "cpu"}, {}, "use_cpu"),
        ({"threads": 64}, {}, "num_cpu_threads_per_process"),
        ({}, {"host to device, pinned": 1e9}, "PCIe"),
        ({}, {"all-reduce": 1e8}, "topo"),
        ({}, {"all-reduce": 1e11, "host to device, pinned": 2e10}, None),
        ({"device type": "cpu", "accelerators": ""}, {"all-reduce": 1e8}, None),
    ],
)
def test_advice_is_given_for_what_is_slow_or_unused(changes, speeds, part):
    lines = advice({}, [{"facts": facts(**changes), "speeds": speeds}], cores=8)
    assert [part in line for line in lines] == ([True] if part else [])


def test_the_checks_are_launched_as_a_script_would_be():
    options = Namespace(config_file="c.yaml", num_processes=2, mixed_precision=None, cpu=True, timeout=60)
    line = selftest.launch_line(options, Path("folder"))
    assert line == [
        sys.executable, "-m", "accel_cli", "launch", "--quiet", "--config_file", "c.yaml",
        "--num_processes", "2", "--cpu", "-m", selftest.WORKER, "folder", "20.0",
    ]  # fmt: skip


def test_a_program_that_does_not_end_is_ended():
    code, _ = selftest.launch([sys.executable, "-c", "import time; time.sleep(100_000)"], 0.1)
    assert code < 0


def test_the_output_of_a_program_is_kept():
    line = [sys.executable, "-c", "import sys; print('here'); sys.exit(3)"]
    assert selftest.launch(line, 100_000) == (3, "here\n")


@pytest.fixture
def launched(monkeypatch):
    """Let what is launched leave given reports."""

    def prepare(*reports, code=0):
        def launch(line, limit):
            assert limit == 300
            for report in reports:
                (Path(line[-2]) / f"rank{report['rank']}.json").write_text(json.dumps(report))
            return code, "its output\n"

        monkeypatch.setattr(selftest, "launch", launch)

    return prepare


OPTIONS = {
    "html": None,
    "config_file": None,
    "num_processes": None,
    "mixed_precision": None,
    "cpu": True,
    "timeout": 300,
}


def passed(rank=0, world_size=1, **changes):
    return report(rank, world_size, **{**dict.fromkeys(CHECKS, PASSED), **changes})


def test_all_checks_that_pass_make_exit_code_0(launched, capsys):
    launched(passed())
    assert selftest.run(Namespace(**OPTIONS, json=False, quiet=False)) == 0
    shown = capsys.readouterr()
    assert [name for name in CHECKS if name not in shown.out] == []
    assert "trains correctly" in shown.out
    assert shown.err == ""


def test_one_that_fails_makes_exit_code_1_with_advice_and_what_was_said(launched, capsys):
    launched(passed(0, 2), passed(1, 2, collectives=FAILED), code=1)
    assert selftest.run(Namespace(**OPTIONS, json=False, quiet=True)) == 1
    shown = capsys.readouterr()
    assert "collectives" in shown.out
    assert "data loader" not in shown.out
    assert ABOUT["collectives"] in shown.out
    assert shown.err == "its output\n"


def test_the_results_come_as_json_too(launched, capsys):
    launched(passed())
    assert selftest.run(Namespace(**OPTIONS, json=True, quiet=False)) == 0
    results = json.loads(capsys.readouterr().out)
    assert {check["result"] for check in results["checks"].values()} == {PASSED}


def test_what_could_not_be_started_keeps_its_exit_code(launched, capsys):
    launched(code=2)
    assert selftest.run(Namespace(**OPTIONS, json=False, quiet=False)) == 2
    assert capsys.readouterr().err == "its output\n"
