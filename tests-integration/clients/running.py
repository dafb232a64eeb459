"""Run a client's program as its user would."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
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
