"""`accel tpu-config`: run commands on every host of a TPU pod, through gcloud."""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from accel_cli.config_file import read_config
from accel_cli.launch.run_pod import ssh_arguments
from accel_cli.output import show
from accel_cli.text_file import command_lines
from accel_state.environ import read
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Mapping, Sequence

DISTRIBUTION = "accel-suite"
"""The distribution that `--install_accelerate` installs."""

_VERSION = re.compile(r"\d+(\.\w+)*")


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
    program = shutil.which(command[0])
    if program is None:
        raise SettingsError("the program gcloud is not on the PATH: install the Google Cloud CLI.")
    return subprocess.run([program, *command[1:]], check=False).returncode


def plan(*, name: str | None, zone: str | None, commands: Sequence[str], alpha: bool = False) -> list[str]:
    """Return the command line that runs commands on all hosts of a pod, in /usr/share as Accelerate does.

    Example:
        >>> plan(name="pod", zone="us-central1-a", commands=["ls"])[-3:]
        ['--zone=us-central1-a', '--command=cd /usr/share; ls', '--worker=all']
    """
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
        raise SettingsError("arguments --command and --command_file contradict each other; give one of them.")
    if file:
        commands = command_lines(str(file), "command file")
    elif not commands:
        found = config.get("commands") or []
        commands = [str(one) for one in (found if isinstance(found, list) else [found])]
    return [*_installation(options), *commands]


def _installation(options: Namespace) -> list[str]:
    if not options.install_accelerate:
        return []
    version = options.accelerate_version
    if version == "latest":
        return [f"pip install {DISTRIBUTION} -U"]
    if not _VERSION.fullmatch(version):
        raise SettingsError(
            f"argument --accelerate_version is {version!r}: expected 'latest' or a version, as 0.1.0."
        )
    return [f"pip install {DISTRIBUTION}=={version}"]
