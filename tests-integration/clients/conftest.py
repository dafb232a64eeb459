"""The environment of the libraries that import `accelerate`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "clients"


@pytest.fixture(scope="session")
def clients_environ() -> dict[str, str]:
    """The variables that programs in that environment see."""
    hidden = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    ours = {
        key: value
        for key, value in os.environ.items()
        if key not in hidden and not key.startswith("ACCELERATE_")
    }
    return {**ours, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(scope="session")
def python(clients_environ: dict[str, str]) -> Path:
    """The interpreter of the environment, made as the lock says; a moment if it is there already."""
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv is not None, "uv is not on the path: it makes the environment of these tests"
    line = [uv, "sync", "--frozen", "--quiet", "--no-default-groups", "--group", "clients"]
    done = subprocess.run(
        line,
        cwd=ROOT,
        env={**clients_environ, "UV_PROJECT_ENVIRONMENT": str(ENVIRONMENT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    python = ENVIRONMENT / "bin" / "python"
    share_bytecode(python)
    return python


def share_bytecode(python: Path) -> None:
    """Give an environment the bytecode of the libraries that this one has, too: to compile them takes 20 s.

    Python compiles those anew whose sources have another size or date.
    """
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    here, there = Path(sysconfig.get_path("purelib")), Path(done.stdout.strip())
    for file in here.glob("**/__pycache__/*.pyc"):
        target = there / file.relative_to(here)
        if target.parent.parent.is_dir() and not target.exists():
            target.parent.mkdir(exist_ok=True)
            with suppress(OSError):  # on another file system
                target.hardlink_to(file)
