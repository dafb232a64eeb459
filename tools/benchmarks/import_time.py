"""Import time of accel, relative to `import torch`.

    uv run python tools/benchmarks/import_time.py [--reference-python PATH]

Every statement runs in fresh interpreters, and the statements alternate. Printed is the median wall time of
the statement itself (the interpreter's own start is not in it) and the median of its ratios to the `import
torch` of the same turn and interpreter. Modules are compiled before, also where the environment says that
Python writes no bytecode. Claim: `import accel` at most 1.12 of `import torch`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from compared import options

CLAIM = 1.12
BASELINE = "import torch"
OURS = (BASELINE, "import accel", "from accel import Accelerator")
THEIRS = (BASELINE, "import accelerate", "from accelerate import Accelerator")


def seconds(python: str, statement: str) -> float:
    """Wall time of one statement in a fresh interpreter."""
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    return float(subprocess.check_output([python, "-c", code], text=True, env=environment))


def compare(python: str, statements: tuple[str, ...], rounds: int) -> dict[str, float]:
    """Run the statements alternately, print a line for each, return the ratios to the first."""
    for statement in statements:
        seconds(python, statement)  # files into the page cache, modules compiled
    turns = [{statement: seconds(python, statement) for statement in statements} for _ in range(rounds)]
    ratios: dict[str, float] = {}
    for statement in statements:
        ratios[statement] = statistics.median(turn[statement] / turn[BASELINE] for turn in turns)
        median = statistics.median(turn[statement] for turn in turns)
        print(f"{statement:>36}: {median:6.3f} s, {ratios[statement]:.3f} of `{BASELINE}`")
    return ratios


def main() -> None:
    arguments = options(__doc__, 5, "how often each statement runs").parse_args()
    ratios = compare(sys.executable, OURS, arguments.rounds)
    if arguments.reference_python:
        compare(str(arguments.reference_python), THEIRS, arguments.rounds)
    if ratios["import accel"] > CLAIM:
        sys.exit(f"more than the claimed {CLAIM}")


if __name__ == "__main__":
    main()
