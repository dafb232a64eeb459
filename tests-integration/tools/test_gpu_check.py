"""The steps for a machine with a GPU."""

from __future__ import annotations

import os
import tomllib
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

import gpu_check

if TYPE_CHECKING:
    from collections.abc import Iterable

CLIENTS = "tests-integration/nightly/clients/test_clients_gpu.py"  # in an environment of its own
INSTALLED = ("torch", "transformers", "accelerate", "scikit-learn", "pytest", "hypothesis")
"""What the machine has, as the docstring of `gpu_check` says, besides what these depend on."""


@pytest.mark.parametrize("step", gpu_check.STEPS)
def test_a_step_takes_less_than_ten_minutes(step: str) -> None:
    assert sum(check.seconds for check in gpu_check.STEPS[step]) < 600


def test_every_test_that_needs_a_gpu_is_in_a_step() -> None:
    files = chain(
        gpu_check.ROOT.glob("packages/*/tests/test_*.py"),
        gpu_check.ROOT.glob("tests-integration/**/test_*.py"),
    )
    marked = {str(file.relative_to(gpu_check.ROOT)) for file in files if "mark.gpu" in file.read_text()}
    checked = {word for checks in gpu_check.STEPS.values() for check in checks for word in check.command}
    on_simulated_ones = "tests-integration/simulated/test_gpu_marked.py"
    assert marked - checked <= {CLIENTS, on_simulated_ones, "tests-integration/tools/test_gpu_check.py"}


def test_programs_and_files_of_all_steps_exist() -> None:
    words = [word for checks in gpu_check.STEPS.values() for check in checks for word in check.command]
    paths = [word for word in words if "/" in word]
    assert [path for path in paths if not (gpu_check.ROOT / path).exists()] == []


@pytest.mark.parametrize(("seconds", "state"), [(2, "interrupted"), (600, "passed")])
def test_a_check_that_takes_too_long_is_interrupted(capfd: Any, seconds: int, state: str) -> None:
    program = f"print('begun', flush=True); import time; time.sleep({3600 if seconds == 2 else 0})"
    check = gpu_check.Check(name="waits", command=("-c", program), seconds=seconds)
    assert gpu_check.run(check, {**os.environ}, "", rehearse=False) == state
    assert "begun" in capfd.readouterr().out


def test_the_wheels_have_every_dependency_that_the_machine_lacks() -> None:
    packages = tomllib.loads((gpu_check.ROOT / "uv.lock").read_text())["package"]
    locked = {package["name"]: package for package in packages}
    members = [name for name, package in locked.items() if "editable" in package["source"]]
    assert "accel-train" in members
    packed = {*members, *chain.from_iterable(gpu_check.WHEELS.values()), *gpu_check.SOURCES}
    assert dependencies(packed, locked) - dependencies(INSTALLED, locked) - packed == set()


def dependencies(names: Iterable[str], locked: dict[str, dict[str, Any]]) -> set[str]:
    """Distributions and all that they depend on without extras, as `uv.lock` has them."""
    reached: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += [each["name"] for each in locked[name].get("dependencies", ())]
    return reached
