"""One process: the command of `python script`, with the same interpreter."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


def job(plan: LaunchPlan) -> Job:
    """The program to become.

    Args:
        plan: What to run.

    Raises:
        SettingsError: With `--no_python`, there is no such program.
    """
    if plan.launch.no_python:
        return Job(command=(program(plan), *plan.script_arguments), environ=plan.environ)
    module = ["-m"] if plan.launch.module else []
    line = (sys.executable, *module, plan.script, *plan.script_arguments)
    return Job(command=line, environ=plan.environ)


def program(plan: LaunchPlan) -> str:
    """The program that `--no_python` runs, as a shell would find it.

    Raises:
        SettingsError: There is no such program.
    """
    found = shutil.which(plan.script, path=plan.environ.get("PATH"))
    if found is None:
        raise SettingsError(f"--no_python: there is no program {plan.script!r} on the path.")
    return found


def worker_line(plan: LaunchPlan, *, aloud: bool) -> list[str]:
    """What one of several processes runs.

    Args:
        plan: What to run.
        aloud: Whether a traceback is shown where it happens, rather than left to the launcher.

    Raises:
        SettingsError: With `--no_python`, there is no such program.
    """
    if plan.launch.no_python:
        return [program(plan), *plan.script_arguments]
    switches = [*(["--aloud"] if aloud else []), *(["-m"] if plan.launch.module else [])]
    return [*switches, plan.script, *plan.script_arguments]


def require_script(plan: LaunchPlan) -> None:
    """Make sure that there is something to run.

    Raises:
        SettingsError: There is not.
    """
    if not (plan.launch.module or plan.launch.no_python or Path(plan.script).exists()):
        raise SettingsError(f"there is no script {plan.script!r} to run.")
