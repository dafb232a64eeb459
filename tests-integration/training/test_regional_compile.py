"""Compiling by regions takes at most a third of the time of compiling the whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "tools/benchmarks/regional_compile.py"


@pytest.mark.slow
def test_regions_of_a_transformer_of_24_blocks_compile_in_a_third_of_the_time():
    done = subprocess.run([sys.executable, BENCHMARK], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
