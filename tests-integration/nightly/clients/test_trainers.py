"""Trainers that are installed find on accel what they find on Accelerate, to the last digit.

`tools/trainers.py` installs them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))
import trainers

CASES = [*trainers.cases(trainers.TRAINERS, (1, 2))]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which Accelerate and accel are."""
    folder = tmp_path_factory.mktemp("libraries")
    trainers.install_libraries(folder)
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "case", "ranks"), CASES)
def test_a_trainer_finds_on_accel_what_it_finds_on_the_reference(
    name: str, case: str, ranks: int, request: pytest.FixtureRequest
) -> None:
    if not trainers.python_of(name).exists():
        pytest.skip(f"{name} is not installed: uv run python tools/trainers.py {name}")
    libraries: Path = request.getfixturevalue("libraries")
    assert trainers.compare(name, case, libraries, ranks=ranks) == "equal"
