"""`accel check` finds no problem in an example of the repository, and `accel doctor` no difference."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness import chosen_params
from harness.checks import Checked, run_checks

if TYPE_CHECKING:
    from collections.abc import Iterable

EXAMPLES = Path(__file__).resolve().parents[2] / "packages/accel-suite/examples"
STRATEGIES = EXAMPLES / "strategies"
UNCHECKED = {
    "big_model": "it reads the weights that it has written",
    "cross_validation": "results of all ranks are counted, and those of other ranks are made up",
    "distributed_generation": "results of all ranks are counted, and those of other ranks are made up",
    "distributed_inference": "results of all ranks are counted, and those of other ranks are made up",
    "language_model": "it trains for a number of steps, all of which are followed, for minutes",
    "megatron_lm_gpt_pretraining": "it reads the weights that it has written",
    "weight_sync": "how much it sends depends on which values have changed",
}
"""Examples that a dry run cannot follow, which writes no weights, has no values and no other ranks."""

INFERENCE = {"big_model", "distributed_generation", "distributed_inference", "pipeline"}
"""Examples that train nothing."""

NEEDS = {
    "lora": "peft",
    "deepspeed_with_config_support": "deepspeed",
    "megatron_lm_gpt_pretraining": "megatron",
}
"""Packages that examples import."""


def examples(excluded: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The command lines for the other examples, by name."""
    scripts = (path for path in EXAMPLES.rglob("*.py") if path.parent != STRATEGIES)
    lines = {path.stem: (str(path),) for path in scripts}
    assert {*excluded} <= lines.keys()
    script = str(STRATEGIES / "language_model.py")
    for path in STRATEGIES.glob("configs/*.yaml"):
        options = ["--experts", "4"] if path.stem == "ep" else []
        lines[f"strategies, {path.stem}"] = ("--config_file", str(path), script, *options)
    return {name: line for name, line in sorted(lines.items()) if name not in excluded}


CHECKED, TRAINING = examples(UNCHECKED), examples(INFERENCE)
BATCHES = {"profiler": "6"}
"""The batches of each loader: one example profiles the sixth."""


def params(names: Iterable[str]) -> list[Any]:
    """The names, skipped where the package that an example imports is missing."""
    missing = {name for name, package in NEEDS.items() if find_spec(package) is None}
    skip = pytest.mark.skipif(True, reason="its package is not installed")
    return [pytest.param(name, marks=[skip] if name in missing else []) for name in names]


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checked]:
    """What `accel check` says of each chosen example; all are forked from one process."""
    base, lines = tmp_path_factory.mktemp("checked"), {}
    for name in dict.fromkeys(params["name"] for params in chosen_params(request)):
        (base / name).mkdir()
        steps = ["--steps", "6"] if name.startswith("strategies") else []
        lines[name] = ("--batches", BATCHES.get(name, "1"), "--json", *CHECKED[name], *steps)
    return run_checks(lines, base, {"HF_HOME": str(base / "hf"), "OMP_NUM_THREADS": "1"})


@pytest.mark.thorough
@pytest.mark.parametrize("name", params(CHECKED))
def test_no_problem_is_found_in_an_example(checked, name):
    check = checked[name]
    assert check.output, check.errors
    found = json.loads(check.output)
    assert found["problems"] == []
    assert check.code == 0
    assert {*check.folder.iterdir()} == {check.folder / file for file in ("code", "err", "out")}, "it writes"


@pytest.mark.thorough
@pytest.mark.parametrize("name", params(TRAINING))
def test_nothing_is_said_against_an_example(tmp_path, name):
    if "strategies, megatron" in name and not torch.cuda.is_available():
        pytest.skip("Megatron trains on GPUs")
    (tmp_path / name).mkdir()
    variables = {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    check = run_checks({name: ("--json", *TRAINING[name])}, tmp_path, variables, "doctor")[name]
    told = json.loads(check.output)["diagnoses"]
    assert not [diagnosis for diagnosis in told if diagnosis["differs"]], check.errors
    assert check.code == 0
