"""The options of the programs that compare with the reference."""

from __future__ import annotations

import argparse
from pathlib import Path


def options(description: str | None, rounds: int, about: str) -> argparse.ArgumentParser:
    """A parser with `--rounds`, whose default and help are given, and `--reference-python`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=about)
    parser.add_argument(
        "--reference-python", type=Path, help="interpreter of an environment with the reference"
    )
    return parser
