"""A subcommand: count the lines of a file."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path


def run(words):
    """Count the lines of a file."""
    parser = ArgumentParser("accel count-lines", description=run.__doc__)
    parser.add_argument("file", type=Path)
    lines = parser.parse_args(words).file.read_text().splitlines()
    print(len(lines))
    return 0 if lines else 1
