"""Run a client's program as its user would, and compare what two runs found."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


def run_client(
    python: Path | str,
    program: Path,
    *arguments: str,
    ranks: int,
    on_accel: bool,
    environ: Mapping[str, str],
    folder: Path,
) -> None:
    """Run a program, under torchrun if there are several ranks, and check that it ends with 0.

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
