"""Run the tests of XLA devices, in an environment of their own: `tests-integration/xla`.

torch_xla belongs to one version of torch, which is not the one that everything else is locked to. The
environment, build/xla, is made as the lock says; a moment if it is there already. Where that fails (there are
wheels for Linux on x86-64 only), the tests are skipped, with what the installer said. Devices are those of
PJRT's CPU client: one in the first process of tests, four in the second, which is sharded (SPMD).

    uv run tools/check_xla.py [--all]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from handle_signals import handle_signals

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = ROOT / "build" / "xla"
TESTS = "tests-integration/xla"
DEVICES = {"test_one_device.py": "1", "test_launch.py": "1", "test_sharded.py": "4"}
"""Each file of tests, and the number of devices of its process."""
SYNC = ("sync", "--frozen", "--quiet", "--no-default-groups", "--group", "xla")
INSTALL_SECONDS = 300
_HIDDEN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_USE_SPMD")


def main() -> int:
    """Make the environment and run the tests in it; return 0 if all passed."""
    handle_signals()
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        print("uv is not on the path: it makes the environment of these tests")
        return 1
    environ = {name: value for name, value in os.environ.items() if name not in _HIDDEN}
    environ |= {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    why = failure_of([uv, *SYNC], {**environ, "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)})
    if why is not None:
        print(f"No test of XLA devices ran: torch_xla cannot be installed here.\n{why}\n1 skipped in 0.00s")
        return 0
    return max(run_tests(environ, *item) for item in DEVICES.items())


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


def run_tests(environ: dict[str, str], file: str, devices: str) -> int:
    """Run a file of tests with a number of devices; return pytest's exit code."""
    python = str(ENVIRONMENT / "bin" / "python")
    line = [python, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", f"{TESTS}/{file}"]
    line += [] if "--all" in sys.argv else ["-m", "not thorough"]
    client = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": devices}
    return subprocess.run(line, cwd=ROOT, env={**environ, **client}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
