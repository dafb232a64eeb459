"""Every name that Accelerate's modules show, or that libraries in use import, is there at its path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = Path(__file__).with_name("names_in_use.txt")
VISIBLE = Path(__file__).parents[2] / "accel-suite" / "reference_names.json"

PROGRAM = """
import importlib, json, sys
import accel_compat

accel_compat.install()

def is_present(path):
    module, _, name = path.rpartition(".")
    try:
        holder = importlib.import_module(module)
    except ModuleNotFoundError:
        outer, _, owner = module.rpartition(".")
        holder = getattr(importlib.import_module(outer), owner, None)
        if not isinstance(holder, type):
            return False
    if hasattr(holder, name):
        return True
    try:
        importlib.import_module(path)
    except ImportError:
        return False
    return True

paths = json.load(sys.stdin)
print(json.dumps([path for path in paths if not is_present(path)]))
"""


def ask(paths: list[str]) -> list[str]:
    """Return which names are not there under the alias."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(paths), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_names_in_use_are_there_at_their_path() -> None:
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    later = {line.removeprefix("! ") for line in lines if line.startswith("! ")}
    names = sorted(later | {line for line in lines if not line.startswith("! ")})
    assert len(names) > 220
    assert set(ask(names)) == later


def test_every_name_that_accelerates_modules_show_is_there() -> None:
    if not VISIBLE.exists():
        pytest.skip("the workspace is not here: the package is tested alone")
    table: dict[str, dict[str, str]] = json.loads(VISIBLE.read_text())
    names = [f"{module}.{name}" for module, names in table.items() for name in names]
    missing = ask(names)
    assert len(names) > 1_550
    assert not missing
