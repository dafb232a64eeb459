"""`accel tpu-config`: run commands on all hosts of a TPU pod; install a torch_xla that matches torch."""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from accel_cli.config_file import read_config
from accel_cli.launch.hosts import read_commands
from accel_cli.launch.launchers import require_program, ssh_arguments
from accel_cli.output import show
from accel_state.environ import read
from accel_state.errors import AccelError, SettingsError, UnsupportedError

logger = logging.getLogger(__name__)


def run(options: Namespace) -> int:
    """Run commands on a pod, or show the command line."""
    config = read_config(options.config_file, read()).content
    command = plan(
        name=options.tpu_name or config.get("tpu_name"),
        zone=options.tpu_zone or config.get("tpu_zone"),
        commands=_commands(options, config),
        alpha=options.use_alpha,
    )
    if options.debug:
        words = (word.replace("=", " ", 1) if word.startswith("--") else word for word in command)
        show(f"Running {' '.join(words)}")
        return 0
    program = require_program("gcloud", "a TPU pod needs gcloud", read())
    return subprocess.run([program, *command[1:]], check=False).returncode


def plan(*, name: str | None, zone: str | None, commands: Sequence[str], alpha: bool = False) -> list[str]:
    """Return the command line that runs commands on all hosts of a pod, in /usr/share as Accelerate does."""
    missing = {"--tpu_name": name, "--tpu_zone": zone, "--command": commands}
    for flag, value in missing.items():
        if not value:
            raise SettingsError(f"argument {flag} is required, or its key in the config file.")
    return [
        "gcloud",
        *(["alpha"] if alpha else []),
        *ssh_arguments(name, zone, "; ".join(["cd /usr/share", *commands])),
    ]


def _commands(options: Namespace, config: Mapping[str, Any]) -> list[str]:
    commands: list[str] = [" ".join(words) for words in options.command or ()]
    file = options.command_file or (None if commands else config.get("command_file"))
    if commands and options.command_file:
        raise SettingsError(
            "arguments --command and --command_file are mutually exclusive: pass only one of them."
        )
    if file:
        commands = read_commands(str(file), "command file")
    elif not commands:
        configured = config.get("commands") or []
        commands = [str(line) for line in (configured if isinstance(configured, list) else [configured])]
    if not options.install_accelerate:
        return commands
    version = options.accelerate_version
    if version != "latest" and not _VERSION.fullmatch(version):
        raise SettingsError(
            f"argument --accelerate_version is {version!r}: expected 'latest' or a version such as 0.1.0."
        )
    return [f"pip install {DISTRIBUTION}{' -U' if version == 'latest' else f'=={version}'}", *commands]


DISTRIBUTION = "accel-suite"
"""The distribution that `--install_accelerate` installs."""

_VERSION = re.compile(r"\d+(\.\w+)*")


class InstallationError(AccelError, RuntimeError):
    """torch_xla could not be installed. The message has the last line of the installer's output."""


def install_xla(upgrade: bool = False) -> None:
    """Install the torch_xla that matches the installed torch, in Google Colab or on a machine with a TPU.

    The commands are logged before they run. Restart the interpreter if torch was imported already.

    Args:
        upgrade: First upgrade torch to the latest version with a torch_xla.

    Raises:
        UnsupportedError: There is no usable TPU on this machine.
        InstallationError: No matching torch is installed, or the installer failed.
    """
    if not has_tpu(read(), Path("/dev")):
        raise UnsupportedError(
            "install_xla() works only in Google Colab and on machines with a TPU. Elsewhere, follow the "
            "instructions at https://github.com/pytorch/xla."
        )
    for line in commands(version("torch"), upgrade=upgrade):
        logger.info("Running %s", shlex.join(line))
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            output_lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
            raise InstallationError(
                f"{shlex.join(line)} failed with exit code {done.returncode}: {output_lines}"
            )


_TPU_VARIABLES = ("COLAB_RELEASE_TAG", "COLAB_TPU_ADDR", "TPU_NAME", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE")
_DEVICES = ("accel*", "vfio/[0-9]*")


def has_tpu(environ: Mapping[str, str], devices: Path) -> bool:
    """Return whether this is Google Colab or a machine with a TPU."""
    return any(name in environ for name in _TPU_VARIABLES) or any(
        next(devices.glob(pattern), None) is not None for pattern in _DEVICES
    )


WHEELS = "https://storage.googleapis.com/libtpu-releases/index.html"
"""The address of the driver of TPUs (docs.pytorch.org/xla, "Installation")."""

_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+")


def commands(torch: str, *, upgrade: bool, python: str = sys.executable) -> Sequence[list[str]]:
    """Return the command lines that install torch_xla."""
    install = [python, "-m", "pip", "install"]
    if upgrade:
        return [[*install, "--upgrade", "torch", "torch_xla[tpu]", "--find-links", WHEELS]]
    release = _RELEASE.match(torch)
    if release is None:
        raise InstallationError(
            f"torch_xla is built only for releases of torch, but {torch!r} is installed. "
            "install_xla(upgrade=True) installs matching versions of both."
        )
    fitting = f"torch_xla[tpu]~={release[1]}.{release[2]}.0"
    return [[*install, f"torch=={release[0]}", fitting, "--find-links", WHEELS]]
