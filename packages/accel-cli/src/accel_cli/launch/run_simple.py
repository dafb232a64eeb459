"""One process: the command of `python script`, with the same interpreter."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


def command(plan: LaunchPlan) -> list[str]:
    """The program to become and its arguments.

    Args:
        plan: What to run.

    Raises:
        SettingsError: With `--no_python`, there is no such program.
    """
    if plan.launch.no_python:
        return [program(plan), *plan.script_arguments]
    module = ["-m"] if plan.launch.module else []
    return [sys.executable, *module, plan.script, *plan.script_arguments]


def program(plan: LaunchPlan) -> str:
    """The program that `--no_python` runs, as a shell would find it.

    Raises:
        SettingsError: There is no such program.
    """
    found = shutil.which(plan.script, path=plan.environ.get("PATH"))
    if found is None:
        raise SettingsError(f"--no_python: there is no program {plan.script!r} on the path.")
    return found
