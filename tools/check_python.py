"""Run every package's unit tests on another Python, in build/python3.N.

The environment is made as the lock says (the group `dev`). Where this machine has no such Python, or the
packages cannot be installed for it, the tests are skipped, with the reason. Pythons of pyenv and of uv count,
including those that are not on the path.

    uv run tools/check_python.py 3.13 [TEST ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from check_xla import HIDDEN, ROOT, failure_of
from handle_signals import handle_signals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SYNC = ("sync", "--frozen", "--quiet")
TESTS = ("-n", "2", "-m", "not thorough", "packages", "--ignore-glob=*/examples")


def main(argv: list[str] | None = None) -> int:
    """Make the environment and run the tests in it, or those that are named; return 0 if all passed."""
    handle_signals()
    parser = argparse.ArgumentParser(description="Run the unit tests on another Python.")
    parser.add_argument("version", help="such as 3.13")
    add_tests(parser)
    arguments = parser.parse_args(argv)
    version: str = arguments.version
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return skip(f"the step unit runs the tests on Python {version}, which this is")
    interpreter = find_python(version)
    if interpreter is None:
        return skip(f"there is no Python {version} on this machine")
    folder = ROOT / "build" / f"python{version}"
    sync = (*SYNC, "--group", "dev", "--python", interpreter)
    return run_tests(folder, sync, arguments, ("--doctest-modules",), what=f"for Python {version}")


def add_tests(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say what pytest runs."""
    parser.add_argument("-o", metavar="NAME=VALUE", help="an option of pytest's configuration")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="run only these files or tests")


def run_tests(
    folder: Path,
    sync: Sequence[str],
    arguments: argparse.Namespace,
    options: Sequence[str] = (),
    *,
    what: str,
) -> int:
    """Make an environment in a folder and run the unit tests in it, or those that are named.

    Args:
        folder: The environment.
        sync: The arguments of uv that make it.
        arguments: Those of `add_tests`.
        options: Further arguments of pytest if no test is named.
        what: What the environment is for, in the reason why no test ran.

    Returns:
        0 if all passed, or if the environment cannot be made here.
    """
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        print("uv is not on the path: it makes the environment of these tests")
        return 1
    environ = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    why = failure_of([uv, *sync], {**environ, "UV_PROJECT_ENVIRONMENT": str(folder)})
    if why is not None:
        return skip(f"the packages cannot be installed {what} here\n{why}")
    environ["PATH"] = os.pathsep.join([str(folder / "bin"), environ.get("PATH", "")])
    configured = ["-o", arguments.o] if arguments.o else ["-p", "no:cacheprovider"]
    tests = arguments.tests or [*TESTS, *options]
    line = [str(folder / "bin" / "python"), "-m", "pytest", "-q", "--color=no", *configured, *tests]
    return subprocess.run(line, cwd=ROOT, env=environ, check=False).returncode


def skip(reason: str) -> int:
    """Print why no test ran, and count it as pytest counts a skipped test."""
    print(f"No test ran: {reason}.\n1 skipped in 0.00s")
    return 0


def find_python(version: str) -> str | None:
    """Return the path of an interpreter of a minor version such as 3.13; None if this machine has none."""
    return next(filter(lambda path: runs(path, version), candidates(version)), None)


def candidates(version: str) -> Iterator[str]:
    """The paths where an interpreter may be: on the path first, then the installations of pyenv and uv."""
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    managed = Path(
        os.environ.get("UV_PYTHON_INSTALL_DIR") or Path.home() / ".local" / "share" / "uv" / "python"
    )
    for folder, pattern in ((pyenv / "versions", f"{version}.*"), (managed, f"cpython-{version}.*")):
        for installation in sorted(folder.glob(pattern)):
            yield str(installation / "bin" / f"python{version}")


def runs(path: str, version: str) -> bool:
    """Return whether a path is an interpreter of this version: the shims of pyenv may not be."""
    code = "import sys; print(*sys.version_info[:2], sep='.')"
    try:
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


if __name__ == "__main__":
    sys.exit(main())
