"""All machines of a DeepSpeed hostfile: the command of DeepSpeed's own launcher."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_cli.launch.run_simple import require_script
from accel_cli.launch.run_torchrun import choose_port
from accel_state.settings.options import BY_VARIABLE

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


def job(plan: LaunchPlan) -> Job:
    """The program to become.

    Args:
        plan: What to run.

    Raises:
        SettingsError: There is no such script, or the port is taken.
    """
    require_script(plan)
    line = (
        sys.executable,
        "-m",
        "accel_cli.launch.deepspeed_hosts",
        *arguments(plan, choose_port(plan.launch)),
    )
    return Job(command=line, environ=plan.environ)


def arguments(plan: LaunchPlan, port: int) -> list[str]:
    """The arguments of DeepSpeed's launcher, after the variables that the other machines get.

    Args:
        plan: What to run.
        port: Where rank 0 listens.
    """
    hosts, launch = plan.merged.settings.hosts, plan.launch
    exported = [name for name in plan.environ if name in BY_VARIABLE or name == "OMP_NUM_THREADS"]
    by_hand = (hosts.launcher or "pdsh") == "nossh"
    return [
        f"--export={','.join(exported)}",
        "--no_local_rank",
        *("--hostfile", hosts.hostfile or ""),
        *(
            ["--no_ssh", "--node_rank", str(launch.machine_rank)]
            if by_hand
            else ["--launcher", hosts.launcher or "pdsh"]
        ),
        *(["--include", hosts.inclusion] if hosts.inclusion else []),
        *(["--exclude", hosts.exclusion] if hosts.exclusion else []),
        *(["--master_addr", launch.main_process_ip] if launch.main_process_ip else []),
        *("--master_port", str(port)),
        *(["--module"] if launch.module else []),
        *(["--no_python"] if launch.no_python else []),
        plan.script,
        *plan.script_arguments,
    ]
