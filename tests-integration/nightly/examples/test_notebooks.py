"""Notebooks run in a kernel, and show what is stored in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[3] / "packages/accel-suite/docs/notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def shown_by(notebook: nbformat.NotebookNode) -> list[list[dict[str, str]]]:
    """Return what each cell shows: text as it is, what is printed and tables without figures, no pictures."""
    shown = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            shown.append([*map(_content, outputs)])
    return shown


def _content(output: Any) -> dict[str, str]:
    if output.output_type == "stream":
        return {"text": " ".join(re.sub(r"\d[\d.e-]*( [KMGT]?B)?", "#", output.text).split())}
    data = output.data
    if "image/png" in data:
        return {"image/png": ""}
    if "text/html" in data:
        return {"text/html": re.sub(r"\d[\d.e-]*( [KMGT]?B)?", "#", data["text/html"])}
    return data


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_stored_in_it(path: Path, tmp_path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    NotebookClient(run, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert shown_by(run) == shown_by(stored)
    assert any(shown_by(run))
