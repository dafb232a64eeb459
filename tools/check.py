"""Every check there is, in one command: `uv run tools/check.py`.

Each step runs even when an earlier one failed; the table at the end says which did, and the exit status is
non-zero if any did.

    uv run tools/check.py --list
    uv run tools/check.py --only types --only unit
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from heed_signals import heed_signals

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "--color=no")
EXAMPLES = "tests-integration/docs"
PYTEST_LINE = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s.*$")
WORDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One check: its name, what it proves, and the command that proves it."""

    name: str
    about: str
    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step ended: exit status, wall time in seconds, and the tests that pytest counted in it."""

    step: Step
    status: int
    seconds: float
    tests: Counter[str]


STEPS = (
    Step(name="format", about="ruff format", command=(PYTHON, "-m", "ruff", "format", "--check", ".")),
    Step(name="lint", about="ruff check", command=(PYTHON, "-m", "ruff", "check", ".")),
    Step(
        name="types",
        about="pyright, strict",
        command=(PYTHON, "-m", "pyright", "--pythonpath", PYTHON),
    ),
    Step(
        name="layers",
        about="imports point down, the cold modules stay cold, no cycles",
        command=(str(Path(PYTHON).with_name("lint-imports")), "--no-cache"),
    ),
    Step(
        name="house",
        about="house rules, with exceptions that only shrink",
        command=(PYTHON, "tools/house_rules.py"),
    ),
    Step(
        name="dependencies",
        about="packages declare what they import, and the reverse",
        command=(PYTHON, "tools/check_deps.py"),
    ),
    Step(
        name="exports",
        about="the export tables are those of api.toml, every implemented documented name is in it",
        command=(PYTHON, "tools/gen_exports.py", "--check"),
    ),
    Step(
        name="settings",
        about="the reference page of settings is that of the table",
        command=(PYTHON, "tools/gen_settings_page.py", "--check"),
    ),
    Step(
        name="surface",
        about="what the documentation names is there, with its parameters; nothing covered is lost",
        command=(PYTHON, "tools/check_surface.py"),
    ),
    Step(
        name="unit",
        about="each package's own tests and docstring examples",
        command=(*PYTEST, "-n", "2", "--doctest-modules", "packages", "--ignore-glob=*/examples"),
    ),
    Step(
        name="integration",
        about="SPMD tests on pooled ranks, and real launches",
        command=(*PYTEST, "--durations=10", "tests-integration", f"--ignore={EXAMPLES}"),
    ),
    Step(
        name="examples",
        about="every example of the README files and the documentation",
        command=(*PYTEST, "--durations=5", EXAMPLES),
    ),
    Step(
        name="isolation",
        about="each wheel installs alone, imports, and passes its own tests",
        command=(PYTHON, "tools/check_isolation.py"),
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen steps; return 0 if all passed."""
    parser = argparse.ArgumentParser(description="Run every check of the workspace.")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this step (may be repeated)")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for step in STEPS:
            print(f"{step.name:<12} {step.about}")
        return 0
    names = [step.name for step in STEPS]
    if unknown := sorted(set(arguments.only or ()) - set(names)):
        parser.error(f"no step is called {', '.join(unknown)}; there are {', '.join(names)}")
    heed_signals()
    started = time.monotonic()
    results = [run(step) for step in STEPS if not arguments.only or step.name in arguments.only]
    print_summary(results, time.monotonic() - started)
    return int(any(result.status for result in results))


def run(step: Step) -> Result:
    """Run one step, passing its output through."""
    print(f"\n##### {step.name}: {step.about}", flush=True)
    tests: Counter[str] = Counter()
    started = time.monotonic()
    with subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            tests.update(counted(line))
    return Result(step=step, status=process.returncode, seconds=time.monotonic() - started, tests=tests)


def environment() -> dict[str, str]:
    """This process's environment, without what would change a test, and with uv on the path."""
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTEST_"))
    }
    uv = os.environ.get("UV") or shutil.which("uv")
    path = [str(Path(PYTHON).parent), *([str(Path(uv).parent)] if uv else []), ours.get("PATH", "")]
    return {
        **ours,
        "PATH": os.pathsep.join(path),
        "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
        "PYTHONUNBUFFERED": "1",
    }


def counted(line: str) -> Counter[str]:
    """What pytest's closing line counts, nothing for any other line.

    Example:
        >>> sorted(counted("3 failed, 40 passed, 1 skipped in 12.30s").items())
        [('failed', 3), ('passed', 40), ('skipped', 1)]
        >>> counted("took 3 s")
        Counter()
    """
    found = PYTEST_LINE.match(line.strip())
    if found is None:
        return Counter()
    pairs = (part.split() for part in found[1].split(", "))
    return Counter({word.removesuffix("s") if word == "errors" else word: int(n) for n, word in pairs})


def print_summary(results: list[Result], seconds: float) -> None:
    """Print the table of steps, then one closing line in pytest's form that counts all tests."""
    print("\n##### summary")
    for result in results:
        tests = ", ".join(f"{result.tests[word]} {word}" for word in WORDS if result.tests[word])
        state = "ok" if result.status == 0 else f"FAILED ({result.status})"
        print(f"{result.step.name:<12} {state:<12} {result.seconds:7.1f} s  {tests}")
    total = sum((result.tests for result in results), Counter[str]())
    failed = [result.step.name for result in results if result.status]
    print(
        f"{len(results) - len(failed)} of {len(results)} steps passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    if failed and not total["failed"] + total["error"]:
        total["error"] = len(failed)
    told = ", ".join(f"{total[word]} {word}" for word in WORDS if total[word]) or "no tests ran"
    print(f"===== {told} in {seconds:.2f}s =====", flush=True)


if __name__ == "__main__":
    sys.exit(main())
