"""The chips of one TPU machine: the command that starts a process for each, or one for all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_cli.launch.run_simple import require_script
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan

EACH, ONE = "each", "one"
"""A process for every chip, or one for all of them."""


def job(plan: LaunchPlan, processes: str = EACH) -> Job:
    """Return the program to become: a process for every chip."""
    if plan.launch.no_python:
        raise SettingsError("--no_python: processes on a TPU run a function of a Python script.")
    require_script(plan)
    module = ["-m"] if plan.launch.module else []
    function = plan.merged.settings.tpu.main_training_function
    line = (sys.executable, "-m", "accel_cli.launch.xla_workers", processes, function, *module, plan.script)
    return Job(command=(*line, *plan.script_arguments), environ=plan.environ)


def job_of_one(plan: LaunchPlan) -> Job:
    """Return the program to become: one process, for all chips."""
    return job(plan, ONE)
