"""Run a table of small programs with the reference and with accel, and print the differences.

    uv run tools/compare_behaviour.py                             # makes an environment with the reference
    uv run tools/compare_behaviour.py --reference-python PATH     # or uses one
    uv run tools/compare_behaviour.py --only 'loaders/*' --show

The programs are in `behaviour/`, one table for each area; all of them run in one process per library and
number of processes. A difference is intended if `behaviour/differences.toml` has it with its reason, of which
the page of differences gets its list (`--write`). One that nobody intended fails, and so does a row of that
file that nothing needs any more.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from textwrap import fill
from typing import Any

from accel_state.topology import free_port

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(__file__).resolve().parent / "behaviour"
TABLE = FOLDER / "differences.toml"
PAGE = ROOT / "packages/accel-suite/docs/reference/differences.md"
BEGIN = "<!-- written by tools/compare_behaviour.py --write -->"
END = "<!-- end -->"
WORLDS = (1, 2)
REFERENCE = "accelerate==1.15.0"
TIMEOUT = 1200.0
"""Seconds for all programs of one library together; the machine may be busy, a hang is forever."""


@dataclass(frozen=True, slots=True)
class Intended:
    """A difference that is meant to be there.

    Args:
        programs: Patterns of names, without the number of processes.
        worlds: With how many processes.
        reason: Why, in a sentence for users.
    """

    programs: tuple[str, ...]
    worlds: tuple[int, ...]
    reason: str

    def covers(self, world: int, name: str) -> bool:
        """Whether a program that differs is one of these."""
        return world in self.worlds and any(fnmatchcase(name, _literal(program)) for program in self.programs)


def main(argv: list[str] | None = None) -> int:
    """Compare, or write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--reference-python", type=Path, help="a Python in which the reference is installed")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="only these programs")
    parser.add_argument("--show", action="store_true", help="print both results of every difference")
    parser.add_argument("--write", action="store_true", help="write the table of the page, and stop")
    parser.add_argument("--check", action="store_true", help="compare the table of the page only")
    arguments = parser.parse_args(argv)
    intended = read_intended()
    if arguments.write or arguments.check:
        return write_page(intended, check=arguments.check)
    with tempfile.TemporaryDirectory(prefix="behaviour") as folder:
        python = arguments.reference_python or make_reference(Path(folder) / "reference")
        reference = run_library(str(python), "accelerate", arguments.only, Path(folder))
        ours = run_library(sys.executable, "accel", arguments.only, Path(folder))
    return report(reference, ours, intended, arguments)


def run_library(python: str, package: str, pattern: str, folder: Path) -> dict[tuple[int, str], Any]:
    """Run the programs with one library, in one job for each number of processes."""
    jobs = [
        [start(python, package, world, rank, port, folder, pattern) for rank in range(world)]
        for world, port in ((world, free_port()) for world in WORLDS)
    ]
    found: dict[tuple[int, str], Any] = {}
    with ThreadPoolExecutor() as threads:
        for world, job in zip(WORLDS, jobs, strict=True):
            ranks = list(threads.map(finish, job))
            found |= {(world, name): [rank[name] for rank in ranks] for name in ranks[0]}
    return found


def start(
    python: str, package: str, world: int, rank: int, port: int, folder: Path, pattern: str
) -> tuple[subprocess.Popen[str], Path]:
    """Start one process; its results will be in the file."""
    out = folder / f"{package}-{world}-{rank}.json"
    command = [python, str(FOLDER / "runner.py"), package, *map(str, (world, rank, port, out)), pattern]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={
            **environ,
            "HF_HOME": str(folder / "hub"),
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, out


def finish(job: tuple[subprocess.Popen[str], Path]) -> dict[str, Any]:
    """Wait for one process, and read what it has found."""
    process, out = job
    try:
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    if process.returncode:
        raise SystemExit(f"{out.stem} ended with {process.returncode}:\n{errors[-4000:]}")
    return json.loads(out.read_text())


def report(
    reference: dict[tuple[int, str], Any],
    ours: dict[tuple[int, str], Any],
    intended: list[Intended],
    arguments: argparse.Namespace,
) -> int:
    """Print what differs; return 0 if all of it is intended, and every listed difference was found."""
    different = [our for our in ours if not same(reference[our], ours[our])]
    used: dict[Intended, int] = defaultdict(int)
    unintended = 0
    for world, name in different:
        cover = next((row for row in intended if row.covers(world, name)), None)
        if cover is not None:
            used[cover] += 1
        unintended += cover is None
        if cover is None or arguments.show:
            print(f"{'intended' if cover else 'DIFFERS '} {world} {name}")
        if arguments.show:
            print(f"    reference {short(reference[world, name])}\n    accel     {short(ours[world, name])}")
    idle = [row for row in intended if not used[row]] if arguments.only == "*" else []
    for row in idle:
        print(f"NOT NEEDED {', '.join(row.programs)}: nothing differs there any more")
    print(
        f"{len(ours)} programs, {len(different)} differ: {len(different) - unintended} intended "
        f"({len(intended)} reasons), {unintended} not"
    )
    return int(bool(unintended or idle))


def same(one: Any, other: Any) -> bool:
    """Whether two results are the same; of failures the class counts, not the message."""
    if isinstance(one, dict) and isinstance(other, dict) and "raises" in one and "raises" in other:
        return one["raises"] == other["raises"]
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 2e-5 * max(1.0, abs(one))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def short(value: Any, width: int = 600) -> str:
    """A result in one line."""
    text = json.dumps(value)
    return text if len(text) <= width else f"{text[:width]}…"


def read_intended() -> list[Intended]:
    """The differences that are meant to be there."""
    rows = tomllib.loads(TABLE.read_text())["difference"] if TABLE.exists() else []
    return [Intended(tuple(row["programs"]), tuple(row.get("worlds", WORLDS)), row["reason"]) for row in rows]


def write_page(intended: list[Intended], *, check: bool) -> int:
    """Write the reasons into the page of differences, or look whether they are there."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = [
        fill(row.reason, 118, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for row in intended
    ]
    wanted = before + "\n".join([BEGIN, "", *lines, "", END]) + after
    if check and text != wanted:
        print(f"{PAGE.relative_to(ROOT)} lacks reasons: run tools/compare_behaviour.py --write")
        return 1
    PAGE.write_text(wanted)
    return 0


def make_reference(folder: Path) -> Path:
    """An environment of its own with the reference, and the same torch."""
    import torch

    python = folder / "bin" / "python"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run(["uv", "venv", "-q", "--python", version, str(folder)], check=True)
    wanted = [
        REFERENCE,
        f"torch=={torch.__version__.partition('+')[0]}",
        "torchao",
        "torchdata",
        "datasets",
        "transformers",
    ]
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *wanted], check=True)
    return python


def _literal(pattern: str) -> str:
    """A pattern in which brackets are brackets: names of programs have them around their arguments."""
    return pattern.replace("[", "[[]")


if __name__ == "__main__":
    sys.exit(main())
