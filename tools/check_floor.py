"""Run every package's unit tests with the oldest torch that their metadata accepts, in build/floor.

The environment is made as the lock says (the group `floor`); a moment if it is there already. Where that
fails, the tests are skipped, with what the installer said.

    uv run tools/check_floor.py [TEST ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys

from check_xla import HIDDEN, ROOT, failure_of
from handle_signals import handle_signals

ENVIRONMENT = ROOT / "build" / "floor"
PYTHON = str(ENVIRONMENT / "bin" / "python")
SYNC = ("sync", "--frozen", "--quiet", "--no-default-groups", "--group", "floor")
TESTS = ("-n", "2", "-m", "not thorough", "packages", "--ignore-glob=*/examples")


def main(argv: list[str] | None = None) -> int:
    """Make the environment and run the tests in it, or those that are named; return 0 if all passed."""
    handle_signals()
    parser = argparse.ArgumentParser(description="Run the unit tests with the oldest torch.")
    parser.add_argument("-o", metavar="NAME=VALUE", help="an option of pytest's configuration")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="run only these files or tests")
    arguments = parser.parse_args(argv)
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        print("uv is not on the path: it makes the environment of these tests")
        return 1
    environ = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    why = failure_of([uv, *SYNC], {**environ, "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)})
    if why is not None:
        print(f"No test ran with the oldest torch: it cannot be installed here.\n{why}\n1 skipped in 0.00s")
        return 0
    options = ["-o", arguments.o] if arguments.o else ["-p", "no:cacheprovider"]
    line = [PYTHON, "-m", "pytest", "-q", "--color=no", *options, *(arguments.tests or TESTS)]
    return subprocess.run(line, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
