"""Types reach the user: mypy agrees with pyright about the file of assertions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]


def test_mypy_finds_the_types_that_are_asserted() -> None:
    sources = os.pathsep.join(str(path) for path in sorted(ROOT.glob("packages/*/src")))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            f"--config-file={FOLDER / 'mypy.ini'}",
            f"--cache-dir={ROOT / 'build' / 'mypy'}",
            str(FOLDER / "assert_types.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
