"""Run every package's unit tests with the oldest torch that their metadata accepts, in build/floor.

The environment is made as the lock says (the group `floor`); a moment if it is there already. Where that
fails, the tests are skipped, with what the installer said.

    uv run tools/check_floor.py [TEST ...]
"""

from __future__ import annotations

import argparse
import sys

from check_python import SYNC, add_tests, run_tests
from check_xla import ROOT
from handle_signals import handle_signals


def main(argv: list[str] | None = None) -> int:
    """Make the environment and run the tests in it, or those that are named; return 0 if all passed."""
    handle_signals()
    parser = argparse.ArgumentParser(description="Run the unit tests with the oldest torch.")
    add_tests(parser)
    sync = (*SYNC, "--no-default-groups", "--group", "floor")
    return run_tests(ROOT / "build" / "floor", sync, parser.parse_args(argv), what="with the oldest torch")


if __name__ == "__main__":
    sys.exit(main())
