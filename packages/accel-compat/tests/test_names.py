"""Every name that libraries in use import is there at its path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NAMES = Path(__file__).with_name("names_in_use.txt")

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


def test_names_in_use_are_there_at_their_path() -> None:
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    later = {line.removeprefix("! ") for line in lines if line.startswith("! ")}
    names = sorted(later | {line for line in lines if not line.startswith("! ")})
    assert len(names) > 220
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(names), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) == later


def test_a_name_that_only_accelerate_has_is_an_error_that_says_so() -> None:
    code = "import accel_compat; accel_compat.install(); from accelerate.utils import _no_such_name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "accel answers for accelerate in this process and has no" in done.stderr
