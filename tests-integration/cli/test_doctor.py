"""`accel doctor`: every planted mistake is found by its name, and nothing is said against right scripts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from accel_inspect.doctor.causes import CAUSES, NOTES
from harness.checks import Checked, run_checks
from harness.doctor_programs import DEFECTS, RIGHT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from harness.doctor_programs import Program

EXAMPLES = Path(__file__).resolve().parents[2] / "packages/accel-suite/examples"

NEEDS = {
    "lora": "peft",
    "deepspeed_with_config_support": "deepspeed",
    "megatron_lm_gpt_pretraining": "megatron",
}
"""Packages that examples import."""

USUAL = ("clipping", "evaluation", "noise in the loop", "resumes where it stopped", "FSDP")
"""The right scripts that are run with every commit."""

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


def run_all(base: Path, programs: Mapping[str, Program]) -> dict[str, Checked]:
    """Run the command on scripts, each in its folder."""
    for name, program in programs.items():
        (base / name).mkdir()
        (base / name / "train.py").write_text(program.source)
    lines = {name: ("--json", *program.arguments, "train.py") for name, program in programs.items()}
    return run_checks(lines, base, {"HF_HOME": str(base / "hf"), "OMP_NUM_THREADS": "1"}, "doctor")


def chosen(name: str, *, usual: bool) -> dict[str, Program]:
    """The programs of a table that are run with every commit, or the others."""
    programs, always = {"defects": (DEFECTS, USUAL_DEFECTS), "right": (RIGHT, USUAL)}[name]
    return {key: program for key, program in programs.items() if (key in always) == usual}


@pytest.fixture(scope="module")
def defects(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("defects"), chosen("defects", usual=True))


@pytest.fixture(scope="module")
def more_defects(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("more"), chosen("defects", usual=False))


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("right"), chosen("right", usual=True))


@pytest.fixture(scope="module")
def more_right(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("more"), chosen("right", usual=False))


def names(check: Checked, *, differing: bool = True) -> set[str]:
    """The names of the diagnoses, or of those that say that something differs."""
    assert check.output, check.errors
    diagnoses = json.loads(check.output)["diagnoses"]
    return {diagnosis["name"] for diagnosis in diagnoses if diagnosis["differs"] or not differing}


def assert_found(check: Checked, name: str) -> None:
    """Assert that the mistake of a program was found by its name."""
    assert DEFECTS[name].name in names(check, differing=False), check.errors
    assert check.code == (DEFECTS[name].name not in NOTES)


@pytest.mark.parametrize("name", USUAL_DEFECTS)
def test_a_planted_mistake_is_found_by_its_name(defects, name):
    assert_found(defects[name], name)


@pytest.mark.thorough
@pytest.mark.parametrize("name", chosen("defects", usual=False))
def test_more_planted_mistakes_are_found_by_their_names(more_defects, name):
    assert_found(more_defects[name], name)


def assert_right(check: Checked) -> None:
    """Assert that no check found a difference, and that all were made."""
    assert names(check) == set(), check.errors
    assert check.code == 0
    assert {"data", "numbers", "clocks", "resume"} <= {
        diagnosis["check"] for diagnosis in json.loads(check.output)["diagnoses"]
    }


@pytest.mark.thorough
@pytest.mark.parametrize("name", USUAL)
def test_nothing_is_said_against_a_right_script(right, name):
    assert_right(right[name])


@pytest.mark.thorough
@pytest.mark.parametrize("name", chosen("right", usual=False))
def test_nothing_is_said_against_more_right_scripts(more_right, name):
    assert_right(more_right[name])


def examples() -> dict[str, tuple[str, ...]]:
    """The command lines for all examples that train, by name."""
    lines = {path.stem: (str(path),) for path in EXAMPLES.glob("by_feature/*.py")}
    del lines["distributed_inference"]
    lines |= {path.stem: (str(path),) for path in EXAMPLES.glob("*.py")}
    lines |= {path.stem: (str(path),) for path in EXAMPLES.glob("complete/*.py")}
    script = str(EXAMPLES / "strategies/language_model.py")
    for path in EXAMPLES.glob("strategies/configs/*.yaml"):
        options = ["--experts", "4"] if path.stem == "ep" else []
        lines[f"strategies, {path.stem}"] = ("--config_file", str(path), script, *options)
    return lines


@pytest.mark.thorough
@pytest.mark.parametrize("name", sorted(examples()))
def test_nothing_is_said_against_an_example(tmp_path, name):
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"it needs {NEEDS[name]}")
    if "strategies, megatron" in name and not torch.cuda.is_available():
        pytest.skip("Megatron trains on GPUs")
    (tmp_path / name).mkdir()
    variables = {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    check = run_checks({name: ("--json", *examples()[name])}, tmp_path, variables, "doctor")[name]
    told = json.loads(check.output)["diagnoses"]
    assert not [diagnosis for diagnosis in told if diagnosis["differs"]], check.errors
    assert check.code == 0


@pytest.mark.parametrize("name", ["noise in the loop"])
def test_random_numbers_of_the_script_are_reported(right, name):
    assert "numbers-not-compared" in names(right[name], differing=False)


def test_the_page_of_the_command_lists_every_diagnosis():
    guide = Path(__file__).resolve().parents[2] / "packages/accel-suite/docs/guides/commands.md"
    rows = [line for line in guide.read_text().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*CAUSES]
    for row, (name, cause) in zip(rows, CAUSES.items(), strict=True):
        _, kind, advice, link = row.split(" | ")
        assert kind == ("note" if name in NOTES else "differs")
        assert advice == cause
        assert ".md)" in link
