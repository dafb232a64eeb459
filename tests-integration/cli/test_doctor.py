"""`accel doctor`: every planted mistake is found by its name, and nothing is said against right scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from accel_inspect.doctor.causes import CAUSES, NOTES
from harness import cases, chosen_params
from harness.checks import Checked, run_checks
from harness.doctor_programs import DEFECTS, RIGHT

USUAL_DEFECTS = (
    "loader not prepared",
    "sharded twice",
    "epoch not set",
    "no_sync around the step",
    "mean of means",
    "unused branch",
    "in-place update under FSDP",
    "clip before unscale",
    "resume without skipping",
)
"""The planted mistakes that are run with every commit."""


@pytest.fixture(scope="module")
def diagnosed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
    """What the command says of each script with a chosen test; all are forked from one process."""
    asked = {params["name"] for params in chosen_params(request)}
    base = tmp_path_factory.mktemp("scripts")
    lines = {}
    for name, program in {**DEFECTS, **RIGHT}.items():
        if name in asked:
            (base / name).mkdir()
            (base / name / "train.py").write_text(program.source)
            lines[name] = ("--json", *program.arguments, "train.py")
    return run_checks(lines, base, {"HF_HOME": str(base / "hf"), "OMP_NUM_THREADS": "1"}, "doctor")


def names(check: Checked, *, differing: bool = True) -> set[str]:
    """The names of the diagnoses, or of those that say that something differs."""
    assert check.output, check.errors
    diagnoses = json.loads(check.output)["diagnoses"]
    return {diagnosis["name"] for diagnosis in diagnoses if diagnosis["differs"] or not differing}


@pytest.mark.parametrize("name", cases(DEFECTS, always={*USUAL_DEFECTS}))
def test_a_planted_mistake_is_found_by_its_name(diagnosed, name):
    check = diagnosed[name]
    assert DEFECTS[name].name in names(check, differing=False), check.errors
    assert check.code == (DEFECTS[name].name not in NOTES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_said_against_a_right_script(diagnosed, name):
    """No check finds a difference, and all are made."""
    check = diagnosed[name]
    assert names(check) == set(), check.errors
    assert check.code == 0
    assert {"data", "numbers", "clocks", "resume"} <= {
        diagnosis["check"] for diagnosis in json.loads(check.output)["diagnoses"]
    }


@pytest.mark.parametrize("name", ["noise in the loop"])
def test_random_numbers_of_the_script_are_reported(diagnosed, name):
    assert "numbers-not-compared" in names(diagnosed[name], differing=False)


def test_the_page_of_the_command_lists_every_diagnosis():
    guide = Path(__file__).resolve().parents[2] / "packages/accel-suite/docs/guides/commands.md"
    rows = [line for line in guide.read_text().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*CAUSES]
    for row, (name, cause) in zip(rows, CAUSES.items(), strict=True):
        _, kind, advice, link = row.split(" | ")
        assert kind == ("note" if name in NOTES else "differs")
        assert advice == cause
        assert ".md)" in link
