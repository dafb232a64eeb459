"""All machines of a DeepSpeed hostfile: the command of DeepSpeed's own launcher."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_cli.launch.run_simple import require_script, worker_line
from accel_cli.launch.run_torchrun import choose_port
from accel_state.settings.model import BY_VARIABLE

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


def job(plan: LaunchPlan) -> Job:
    """Return the program to become."""
    require_script(plan)
    port = choose_port(plan.launch)
    line = (sys.executable, "-m", "accel_cli.launch.deepspeed_hosts", *arguments(plan, port))
    return Job(command=line, environ={**plan.environ, **_rendezvous(plan, port)})


def arguments(plan: LaunchPlan, port: int) -> list[str]:
    """Return the arguments of DeepSpeed's launcher, after the variables that the other machines get."""
    hosts, launch = plan.merged.settings.hosts, plan.launch
    exported = [name for name in plan.environ if name in BY_VARIABLE or name == "OMP_NUM_THREADS"]
    exported += _rendezvous(plan, port)
    by_hand = (hosts.launcher or "pdsh") == "nossh"
    return [
        f"--export={','.join(exported)}",
        "--no_local_rank",
        # It takes one that is not there for one machine.
        *("--hostfile", str(Path(hosts.hostfile or "").expanduser())),
        *(
            ["--no_ssh", "--node_rank", str(launch.machine_rank)]
            if by_hand
            else ["--launcher", hosts.launcher or "pdsh"]
        ),
        *(["--include", hosts.inclusion] if hosts.inclusion else []),
        *(["--exclude", hosts.exclusion] if hosts.exclusion else []),
        *(["--master_addr", launch.main_process_ip] if launch.main_process_ip else []),
        *("--master_port", str(port)),
        *_worker(plan),
    ]


def _rendezvous(plan: LaunchPlan, port: int) -> dict[str, str]:
    """Return the rendezvous, for the launchers of DeepSpeed that do not set it."""
    if plan.merged.settings.hosts.launcher not in {"openmpi", "slurm"}:
        return {}
    first = next(iter(plan.machine.hosts or {}), "")
    return {"MASTER_ADDR": plan.launch.main_process_ip or first, "MASTER_PORT": str(port)}


def _worker(plan: LaunchPlan) -> list[str]:
    """Return the command line of each process."""
    if plan.launch.no_python:
        return ["--no_python", plan.script, *plan.script_arguments]
    if plan.merged.settings.hosts.launcher == "slurm":  # with which DeepSpeed starts no modules
        module = ["--module"] if plan.launch.module else []
        return [*module, plan.script, *plan.script_arguments]
    return ["--module", "accel_cli.launch.worker", *worker_line(plan, aloud=True)]
