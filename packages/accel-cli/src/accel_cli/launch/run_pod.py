"""All machines of a TPU pod: the `gcloud` command that runs `accel launch` on each."""

from __future__ import annotations

import shlex
import shutil
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings import to_environ

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


def job(plan: LaunchPlan) -> Job:
    """Return the program to become."""
    found = shutil.which("gcloud", path=plan.environ.get("PATH"))
    if found is None:
        raise MissingDependencyError(
            "a TPU pod is reached with gcloud, which is not on the path: install it."
        )
    return Job(command=(found, *arguments(plan)), environ=plan.environ)


def arguments(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `gcloud`."""
    tpu = plan.merged.settings.tpu
    return ssh_arguments(tpu.name, tpu.zone, remote_command(plan), ",".join(tpu.vm) or "all")


def ssh_arguments(name: str | None, zone: str | None, command: str, worker: str = "all") -> list[str]:
    """Return the arguments of `gcloud` that run a command on machines of a pod.

    Raises:
        SettingsError: `gcloud` could take the name for an option.
    """
    if name is not None and name.startswith("-"):
        raise SettingsError(f"tpu_name is {name!r}, which gcloud would take for an option: it is no name.")
    pod = ("compute", "tpus", "tpu-vm", "ssh", name or "", f"--zone={zone or ''}")
    return [*pod, f"--command={command}", f"--worker={worker}"]


def remote_command(plan: LaunchPlan) -> str:
    """Return the command of each machine's shell: those of the configuration, then the script."""
    tpu, launch = plan.merged.settings.tpu, plan.launch
    variables = [*(f"{name}={value}" for name, value in to_environ(plan.merged.settings).items()), *tpu.env]
    line = [
        *(["sudo"] if tpu.use_sudo else []),
        *(["env", *variables] if variables else []),
        *("accel", "launch", "--tpu", "--no_tpu_cluster"),
        *("--main_training_function", tpu.main_training_function),
        *(["--downcast_bf16"] if tpu.downcast_bf16 else []),
        *(["-m"] if launch.module else []),
        plan.script,
        *plan.script_arguments,
    ]
    before = plan.machine.commands or tpu.commands
    return "; ".join([*before, shlex.join(line)])
