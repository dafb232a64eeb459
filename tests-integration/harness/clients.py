"""The environment of libraries that import `accelerate`, in which their programs run, and what they found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def run_client(
    python: Path | str,
    program: Path,
    *arguments: str,
    ranks: int,
    on_accel: bool,
    environ: Mapping[str, str],
    folder: Path,
) -> str:
    """Run a program, under torchrun if there are several ranks, check that it ends with 0; return its output.

    Args:
        python: The interpreter of the environment with the libraries.
        program: The script.
        *arguments: Of the script.
        ranks: The number of processes.
        on_accel: Whether `import accelerate` is accel.
        environ: The environment.
        folder: The working directory.
    """
    several = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"]
    alias = ["-m", "accel_compat"] if on_accel else []
    done = subprocess.run(
        [str(python), *(several if ranks > 1 else []), *alias, str(program), *arguments],
        env=environ,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def differences(where: str, left: Any, right: Any, tolerance: float = 1e-6) -> Iterator[str]:
    """Name what differs: numbers and tensors by more than the tolerance, all else at all.

    Args:
        where: The name of both.
        left: What a case found.
        right: What it found on another library.
        tolerance: Of each number.
    """
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            yield f"{where}: {sorted(left.keys() ^ right.keys())} are on one side only"
        for key in left.keys() & right.keys():
            yield from differences(f"{where}/{key}", left[key], right[key], tolerance)
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(f"{where}/{index}", one, other, tolerance)
    elif isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor) and left.shape == right.shape:
        far = (left.double() - right.double()).abs().max().item() if left.numel() else 0.0
        if not far <= tolerance:
            yield f"{where}: tensors differ by {far}"
    elif isinstance(left, float) and isinstance(right, float):
        if not abs(left - right) <= tolerance:
            yield f"{where}: {left} and {right}"
    elif left != right:
        yield f"{where}: {left!r} and {right!r}"
