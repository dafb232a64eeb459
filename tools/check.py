"""Run all checks: `uv run tools/check.py`.

Every step runs; the table at the end says which failed, and the exit status is non-zero if any did.

    uv run tools/check.py --list
    uv run tools/check.py --only types --only unit
    uv run tools/check.py --all

A test that fails is run once more by itself. If it then passes, its step passes; the test is listed under
FLAKY.

`uv run` alone installs accel and what its examples need. The steps need the group `dev` of pyproject.toml,
so this program starts itself again with `uv run --group dev`. After `uv sync --group dev` it runs directly.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Show = Callable[[str], object]

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
PYTEST = (PYTHON, "-m", "pytest", "-q", "--color=no")
SHOW = functools.partial(print, end="", flush=True)
ONCE_MORE = (*PYTEST, "-p", "no:cacheprovider")
XLA = (PYTHON, "tools/check_xla.py")
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
FLOOR = (PYTHON, "tools/check_floor.py")
EXAMPLES = "tests-integration/docs"
NIGHTLY = "tests-integration/nightly"
INTEGRATION = ("tests-integration", f"--ignore={EXAMPLES}", f"--ignore={NIGHTLY}")
NOT_THOROUGH = ("-m", "not thorough")
WORKERS = str(max(2, os.cpu_count() or 2))
BY_FILE = ("-n", WORKERS, "--dist", "loadfile", "--durations=30")
ALL_TESTS = ("-m", "thorough or not thorough")
PYTEST_LINE = re.compile(r"^=* ?((?:\d+ \w+(?:, )?)+) in [\d.]+s.*$")
WORDS = ("failed", "error", "passed", "skipped", "deselected", "xfailed")
AT_ONCE = 3
"""How many steps run at a time: tests wait for processes, for limits of time and for installations, and while
one step waits, others compute."""
SILENCE = 1500.0
"""After so many seconds without a word, a step waits for what never comes."""
MAX_RERUNS = 10
"""If more tests fail than this, something is broken, and none is run again."""


@dataclass(frozen=True, slots=True)
class Step:
    """One check: its name, what it proves, and the command that proves it.

    Args:
        name: What `--only` calls it.
        about: What it proves, in a few words.
        command: Runs it.
        thorough: Further arguments under `--all`.
        slow: Whether it runs under `--all`, or when it is named, alone.
        once_more: Runs the test whose id is appended. The step's command then takes pytest's option
            `-o cache_dir=FOLDER`, and leaves there which tests failed.
    """

    name: str
    about: str
    command: tuple[str, ...]
    _: KW_ONLY
    thorough: tuple[str, ...] = ()
    slow: bool = False
    once_more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a step ended: exit status, wall time in seconds, the tests that pytest counted, the flaky ones."""

    step: Step
    status: int
    seconds: float
    tests: Counter[str]
    flaky: tuple[str, ...] = ()


STEPS = (  # long ones first; not all those together that would compile the same libraries where they are new
    Step(
        "integration",
        "SPMD tests on pooled ranks, and real launches",
        (*PYTEST, *NOT_THOROUGH, *BY_FILE, *INTEGRATION),
        thorough=ALL_TESTS,
        once_more=ONCE_MORE,
    ),
    Step("types", "pyright, strict", (PYTHON, "-m", "pyright", "--pythonpath", PYTHON)),
    Step(
        "xla",
        "training on XLA devices, as on the CPU (with --all)",
        (*XLA, "--all"),
        slow=True,
        once_more=XLA,
    ),
    Step(
        "unit",
        "each package's own tests and docstring examples",
        (*PYTEST, *NOT_THOROUGH, "-n", WORKERS, "--doctest-modules", "packages", "--ignore-glob=*/examples"),
        thorough=ALL_TESTS,
        once_more=(*ONCE_MORE, "--doctest-modules"),
    ),
    Step(
        "examples",
        "the examples of README files and documentation",
        (*PYTEST, *NOT_THOROUGH, "--durations=5", EXAMPLES),
        thorough=ALL_TESTS,
        once_more=ONCE_MORE,
    ),
    Step(
        "nightly",
        "transformers, peft, trl, diffusers and others find on accel what they find on Accelerate; notebooks",
        (*PYTEST, *BY_FILE, NIGHTLY),
        slow=True,
        once_more=ONCE_MORE,
    ),
    Step(
        "isolation",
        "each wheel installs alone, imports, and runs the examples of its README (with --all)",
        (PYTHON, "tools/check_isolation.py"),
        thorough=("--tests",),
        slow=True,
    ),
    Step("site", "the site builds without a warning", (PYTHON, "tools/build_docs.py")),
    Step("format", "ruff format", (PYTHON, "-m", "ruff", "format", "--check", ".")),
    Step("lint", "ruff check", (PYTHON, "-m", "ruff", "check", ".")),
    Step(
        "layers",
        "imports point down, the cold modules stay cold, no cycles",
        (str(Path(PYTHON).with_name("lint-imports")), "--no-cache"),
    ),
    Step(
        "house",
        "house rules that no linter has, declared dependencies, versions",
        (PYTHON, "tools/house_rules.py"),
    ),
    Step(
        "budgets",
        "no package has more lines of code than its budget, which only falls",
        (PYTHON, "tools/budgets.py"),
    ),
    Step(
        "settings",
        "the reference page of settings is that of the table",
        (PYTHON, "tools/gen_settings_page.py", "--check"),
    ),
    Step(
        "floor",
        "the packages' own tests pass with the oldest libraries that they accept (with --all)",
        (*FLOOR, *NOT_THOROUGH, "-n", WORKERS, "packages", "--ignore-glob=*/examples"),
        slow=True,
        once_more=(*FLOOR, "-p", "no:cacheprovider"),
    ),
    Step(
        "behaviour",
        "small programs do what they do with the reference, or differ for a reason (with --all)",
        (PYTHON, "tools/compare_behaviour.py"),
        slow=True,
    ),
    Step(
        "ordering",
        "a test fails where any one statement that orders asynchronous work is changed (with --all)",
        (PYTHON, "tools/delete_ordering.py"),
        slow=True,
    ),
)


def main(argv: list[str] | None = None) -> int:
    """Run the chosen steps; return 0 if all passed."""
    parser = argparse.ArgumentParser(description="Run every check of the workspace.")
    parser.add_argument("--list", action="store_true", help="name the steps and stop")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", action="append", choices=names, help="run this step (may be repeated)")
    parser.add_argument("--all", action="store_true", help="also what is too slow for every commit")
    arguments = parser.parse_args(argv)
    if arguments.list:
        for step in STEPS:
            print(f"{step.name:<12} {step.about}")
        return 0
    restart_with_the_group(sys.argv[1:] if argv is None else argv)
    handle_signals()
    started = time.monotonic()
    chosen = [
        step
        for step in STEPS
        if (step.name in arguments.only if arguments.only else arguments.all or not step.slow)
    ]
    if arguments.all:
        chosen = [replace(step, command=(*step.command, *step.thorough)) for step in chosen]
    results = [*run_at_once(chosen)] if len(chosen) > 1 else [run(step) for step in chosen]
    print_summary(results, time.monotonic() - started)
    return int(any(result.status for result in results))


def restart_with_the_group(arguments: list[str]) -> None:
    """Start this program again with the group `dev` where `uv run` alone started it, or pytest is missing."""
    is_installed = importlib.util.find_spec("pytest") is not None
    if is_installed and os.environ.get("UV_RUN_RECURSION_DEPTH") != "1":  # `uv run` counts its levels
        return
    if shutil.which(UV) is None:
        raise SystemExit("the checks need the group dev of pyproject.toml: pip install uv")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    os.chdir(ROOT)
    os.execv(UV, [UV, "run", "--group", "dev", "--python", python, "tools/check.py", *arguments])


def run_at_once(steps: list[Step]) -> Iterator[Result]:
    """Run several steps at a time: while one waits, others compute. Print the output of each at its end."""

    def run_quietly(step: Step) -> Result:
        lines: list[str] = []
        result = run(step, lines.append)
        SHOW("".join(lines))
        return result

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(run_quietly, steps)


def run(step: Step, show: Show = SHOW) -> Result:
    """Run one step, passing its output to `show`; run the tests that fail once more, each by itself."""
    show(f"\n##### {step.name}: {step.about}\n")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check") as cache:
        command = (*step.command, "-o", f"cache_dir={cache}") if step.once_more else step.command
        status, tests = passed_through(command, show)
        failed = Path(cache, "v", "cache", "lastfailed")  # where pytest keeps what failed
        suspects = sorted(json.loads(failed.read_text())) if status == 1 and failed.exists() else []
    flaky: list[str] = []
    if 0 < len(suspects) <= MAX_RERUNS:
        for test in suspects:
            show(f"\n##### {step.name}, once more: {test}\n")
            flaky += [test] if passed_through((*step.once_more, test), show)[0] == 0 else []
        errors = max(0, len(flaky) - tests["failed"])
        tests.update({"passed": len(flaky), "failed": errors - len(flaky), "error": -errors})
        status = int(len(flaky) < len(suspects))
    return Result(
        step=step, status=status, seconds=time.monotonic() - started, tests=tests, flaky=tuple(flaky)
    )


def passed_through(command: tuple[str, ...], show: Show) -> tuple[int, Counter[str]]:
    """Run a command, showing what it prints; return its exit status and the tests that pytest counted."""
    tests: Counter[str] = Counter()
    letters: queue.SimpleQueue[str] = queue.SimpleQueue()
    line = ""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    threading.Thread(target=read, args=(process.stdout, letters), daemon=True).start()
    while letter := letter_or_end(letters, process):
        line += letter
        if letter == "\n":
            show(line)
            tests.update(counted(line))
            line = ""
    show(line)
    return process.wait(), tests


def read(output: Any, letters: queue.SimpleQueue[str]) -> None:
    while letter := output.read(1):
        letters.put(letter)
    letters.put("")


def letter_or_end(letters: queue.SimpleQueue[str], process: subprocess.Popen[str]) -> str:
    """Return what comes next, "" at the end; end tests that wait for ever, which then print their stacks."""
    while True:
        try:
            return letters.get(timeout=SILENCE)
        except queue.Empty:
            if process.poll() is not None:  # what it has left behind keeps its output open
                return ""
            own = psutil.Process(process.pid)
            for hanging in own.children(recursive=True) or [own]:  # pytest-xdist starts its workers again
                with contextlib.suppress(psutil.NoSuchProcess):
                    hanging.send_signal(signal.SIGABRT)
                    time.sleep(1)  # one stack after the other


def environment() -> dict[str, str]:
    """Return this process's environment without what would change a test, and with uv on the path.

    Hundreds of processes import torch: bytecode is written, or each would compile it anew (2 of 5 s). They
    compute with one thread, since threads that share a core keep it busy while they wait for each other.
    """
    left_out = ("ACCELERATE_", "PYTEST_", "PYTHONDONTWRITEBYTECODE")
    ours = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
    path = [str(Path(PYTHON).parent), str(Path(UV).parent), ours.get("PATH", "")]
    return {
        **ours,
        "OMP_NUM_THREADS": "1",
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
    flaky = [f"{result.step.name}: {test}" for result in results for test in result.flaky]
    if flaky:
        print("\nFLAKY: these failed, and passed when they ran by themselves", *flaky, sep="\n  ")
    failed = [result.step.name for result in results if result.status]
    print(
        f"{len(results) - len(failed)} of {len(results)} steps passed"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    total["error"] += len(failed) if not total["failed"] + total["error"] else 0
    done = ", ".join(f"{total[word]} {word}" for word in WORDS if total[word]) or "no tests ran"
    print(f"===== {done} in {seconds:.2f}s =====", flush=True)


if __name__ == "__main__":
    sys.exit(main())
