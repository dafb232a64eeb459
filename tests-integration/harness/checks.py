"""Run `accel check` or `accel doctor` several times, forked from one process that has imported torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROGRAM = Path(__file__).with_name("fork_checks.py")


@dataclass(frozen=True)
class Checked:
    """How a check ended: its folder, its exit code and what it printed."""

    folder: Path
    code: int
    output: str
    errors: str


def run_checks(
    checks: Mapping[str, Sequence[str]], base: Path, variables: Mapping[str, str], command: str = "check"
) -> dict[str, Checked]:
    """Run checks, one after the other.

    Args:
        checks: The arguments of each, by name.
        base: Has a folder of that name for each, in which it runs.
        variables: Of the environment, besides those of this process.
        command: The subcommand.

    Returns:
        How each ended, by name.
    """
    jobs = {name: {"folder": str(base / name), "words": [command, *words]} for name, words in checks.items()}
    (base / "jobs").write_text(json.dumps(jobs))
    done = subprocess.run(
        [sys.executable, PROGRAM, base / "jobs"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Checked] = {}
    for name in checks:
        code, output, errors = ((base / name / file).read_text() for file in ("code", "out", "err"))
        found[name] = Checked(base / name, int(code), output, errors)
    return found
