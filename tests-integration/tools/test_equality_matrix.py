"""Every strategy finds what one process finds: the hardest cells of the table, on two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_strategy_equals_one_process() -> None:
    done = subprocess.run(
        [sys.executable, "tools/equality_matrix.py", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ") and "e-0" in line]
    assert len(rows) == 7, done.stdout
    assert "FAIL" not in done.stdout
