"""Installing torch_xla beside the torch that is there, where there is a TPU to use it."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from accel_state.environ import read
from accel_state.errors import AccelError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

WHEELS = "https://storage.googleapis.com/libtpu-releases/index.html"
"""Where the driver of TPUs is (docs.pytorch.org/xla, "Installation")."""

_TPU_VARIABLES = ("COLAB_RELEASE_TAG", "COLAB_TPU_ADDR", "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
_DEVICES = ("accel*", "vfio/[0-9]*")
_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+")


class InstallationError(AccelError, RuntimeError):
    """torch_xla could not be installed. The message has what the installer said last."""


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that fits the installed torch, in Google Colab or on a machine with a TPU.

    The commands are logged before they run. Restart the interpreter if torch was imported already.

    Args:
        upgrade: Upgrade torch first, to the latest for which there is a torch_xla.

    Raises:
        UnsupportedError: There is no TPU here that could be used.
        InstallationError: There is no torch to which it could fit, or the installer failed.
    """
    if not has_tpu(read(), Path("/dev")):
        raise UnsupportedError(
            "install_xla() works in Google Colab and on machines with a TPU, and this is neither. Elsewhere "
            "install torch_xla as https://github.com/pytorch/xla says."
        )
    for line in commands(_installed("torch"), upgrade=upgrade):
        logger.info("Running %s", shlex.join(line))
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            output_lines = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise InstallationError(
                f"{shlex.join(line)} failed with exit code {done.returncode}: {output_lines}"
            )


def has_tpu(environ: Mapping[str, str], devices: Path) -> bool:
    """Whether this is Google Colab, or a machine with a TPU.

    Example:
        >>> has_tpu({"TPU_NAME": "local"}, Path("/nowhere"))
        True
    """
    return any(name in environ for name in _TPU_VARIABLES) or any(
        True for pattern in _DEVICES for _ in devices.glob(pattern)
    )


def commands(torch: str | None, *, upgrade: bool, python: str = sys.executable) -> Sequence[list[str]]:
    """Say the command lines that install torch_xla.

    Raises:
        InstallationError: torch is absent, or no release.

    Example:
        >>> commands("2.9.1+cpu", upgrade=False, python="python")[0][4:6]
        ['torch==2.9.1', 'torch_xla[tpu]~=2.9.0']
    """
    install = [python, "-m", "pip", "install"]
    if upgrade:
        return [[*install, "--upgrade", "torch", "torch_xla[tpu]", "--find-links", WHEELS]]
    release = _RELEASE.match(torch or "")
    if release is None:
        raise InstallationError(
            f"torch_xla is built for releases of torch, and {torch!r} is installed; "
            "install_xla(upgrade=True) installs both."
        )
    fitting = f"torch_xla[tpu]~={release[1]}.{release[2]}.0"
    return [[*install, f"torch=={release[0]}", fitting, "--find-links", WHEELS]]


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
