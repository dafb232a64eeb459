"""Run the tests of XLA devices, in an environment of their own: `tests-integration/nightly/xla`.

torch_xla belongs to one version of torch, which is not the one that everything else is locked to. The
environment, build/xla, is made as the lock says; a moment if it is there already. Where that fails (there are
wheels for Linux on x86-64 only), the tests are skipped, with what the installer said. Devices are those of
PJRT's CPU client: one in the first process of tests, four in the second, which is sharded (SPMD). On a
machine with a TPU, `--tpu` installs its driver, too, and runs the tests that need several processes.

    uv run tools/check_xla.py [--all | --tpu] [TEST ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "xla"
PYTHON = str(ENVIRONMENT / "bin" / "python")
TESTS = "tests-integration/nightly/xla"
FILES = {
    "1": ("test_one_device.py", "test_collectives.py", "test_processes.py", "test_launch.py"),
    "4": ("test_sharded.py",),
}
"""The files of tests, by the number of devices of their process."""
TPU_FILES = ("test_processes.py",)
SYNC = ("sync", "--frozen", "--quiet", "--no-default-groups", "--group", "xla")
INSTALL_SECONDS = 300
HIDDEN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_USE_SPMD")
"""Variables that would change the environment of the tests, or what is tested."""


def main(argv: list[str] | None = None) -> int:
    """Make the environment and run the tests in it, or those that are named; return 0 if all passed."""
    handle_signals()
    parser = argparse.ArgumentParser(description="Run the tests of XLA devices.")
    parser.add_argument("--all", action="store_true", help="also what is too slow for every commit")
    parser.add_argument("--tpu", action="store_true", help="on this machine's TPU, with several processes")
    parser.add_argument("-o", metavar="NAME=VALUE", help="an option of pytest's configuration")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="run only these files or tests")
    arguments = parser.parse_args(argv)
    files = TPU_FILES if arguments.tpu else [file for group in FILES.values() for file in group]
    if unknown := set(arguments.tests) - set(chosen(arguments.tests, files)):
        parser.error(f"not among the tests of {', '.join(files)} in {TESTS}: {' '.join(sorted(unknown))}")
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        print("uv is not on the path: it makes the environment of these tests")
        return 1
    environ = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    why = failure_of([uv, *SYNC], {**environ, "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)})
    if why is None and arguments.tpu:
        why = failure_of([uv, "pip", "install", "--python", PYTHON, "torch_xla[tpu]"], environ)
    if why is not None:
        print(f"No test of XLA devices ran: torch_xla cannot be installed here.\n{why}\n1 skipped in 0.00s")
        return int(arguments.tpu)
    options = ["-o", arguments.o] if arguments.o else ["-p", "no:cacheprovider"]
    if arguments.tpu:
        line = [*options, "-m", "tpu", *chosen(arguments.tests, TPU_FILES)]
        return run_tests({**environ, "PJRT_DEVICE": "TPU"}, line)
    line = [*options, "-m", "tpu or not tpu" if arguments.all or arguments.tests else "not thorough"]
    return max(
        run_tests({**environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": devices}, [*line, *tests])
        for devices, files in FILES.items()
        if (tests := chosen(arguments.tests, files))
    )


def chosen(tests: Sequence[str], files: Sequence[str]) -> list[str]:
    """Of some tests, those in certain files; these files if no test is named."""
    paths = [f"{TESTS}/{file}" for file in files]
    return [test for test in tests if test.partition("::")[0] in paths] if tests else paths


def failure_of(command: list[str], environ: dict[str, str]) -> str | None:
    """Run a command; return what it said if it failed or took longer than `INSTALL_SECONDS`, else `None`."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"It was not installed after {INSTALL_SECONDS} s."
    return done.stderr.strip() if done.returncode else None


def run_tests(environ: dict[str, str], words: Sequence[str]) -> int:
    """Run pytest with these words; return its exit code."""
    line = [PYTHON, "-m", "pytest", "-q", "--color=no", *words]
    return subprocess.run(line, cwd=ROOT, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
