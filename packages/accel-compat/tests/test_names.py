"""Every name that libraries and scripts in use take from `accelerate` is there, at the path they know."""

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
    return hasattr(holder, name)

print(json.dumps({path: is_present(path) for path in json.loads(sys.argv[1])}))
"""


def test_names_in_use_are_there_at_their_path() -> None:
    lines = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]
    later = {line.removeprefix("! ") for line in lines if line.startswith("! ")}
    names = sorted(later | {line for line in lines if not line.startswith("! ")})
    assert len(names) > 150
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(names)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    is_present = json.loads(done.stdout)
    assert {name for name in names if not is_present[name]} == later
