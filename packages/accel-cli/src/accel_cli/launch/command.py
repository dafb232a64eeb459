"""`accel launch`: become the script, or the launcher of its workers."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from accel_cli.config.file import given_by_config
from accel_cli.launch import run_simple, run_torchrun
from accel_cli.launch.args import help_text, read_arguments
from accel_cli.launch.machine import this_machine
from accel_cli.launch.plan import make_plan
from accel_state.environ import read
from accel_state.settings import combine, given_by_environ

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel_cli.launch.plan import LaunchPlan

RUNNERS: Mapping[str, Callable[[LaunchPlan], list[str]]] = {
    "simple": run_simple.command,
    "torchrun": run_torchrun.command,
}
"""The ways to run a plan: each makes the program to become and its arguments."""


def run(arguments: Sequence[str]) -> int:
    """Run a script as the command line, the environment and the config file say.

    Args:
        arguments: What follows `accel launch`.

    Returns:
        0 after help. Otherwise this process becomes the script, or what starts its workers.

    Raises:
        SettingsError: Something does not add up; nothing was started.
    """
    line = read_arguments(arguments)
    if line.script is None:
        sys.stdout.write(help_text())
        return 0
    environ = read()
    merged = combine(line.given, given_by_environ(environ), given_by_config(line.config_file, environ))
    plan = make_plan(merged, line.script, line.script_arguments, environ, this_machine(environ))
    return become(RUNNERS[plan.runner](plan), plan.environ)


def become(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process by another program, so that signals, exit code and streams are its own.

    Windows can only start the program, wait for it and hand on its exit code.

    Args:
        command: The program, with its path, and its arguments.
        environ: Its whole environment.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform != "win32":
        os.execve(command[0], list(command), dict(environ))  # noqa: S606 - no shell is wanted
    return subprocess.run(command, env=dict(environ), check=False).returncode
