"""The cells of the notebooks run, one after the other, in one namespace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sklearn.datasets import load_digits  # whose import sets variables of OpenMP

FOLDER = Path(__file__).resolve().parents[2] / "packages/accel-suite/examples/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells_of(path: Path) -> list[str]:
    content = json.loads(path.read_text())
    assert content["nbformat"] == 4
    return ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(cells_of(path)):
        exec(compile(cell, f"{path.name}, cell {number}", "exec"), namespace)
    results = namespace["results"]
    assert isinstance(results, dict)
    assert [*results] == [0, 1]
    assert results[0] == results[1]
    right, seen = results[0]
    assert seen == len(load_digits().target)
    assert right > 1600
