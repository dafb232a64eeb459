"""Command lines of `mpirun` of Open MPI, Intel MPI and MVAPICH, whose flags differ."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.launch.hostfile import first_machine
from accel_cli.launch.job import Job
from accel_cli.launch.run_simple import require_script, worker_line
from accel_cli.launch.run_torchrun import choose_port
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.settings.model import BY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cli.launch.plan import LaunchPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """A make of `mpirun`; by default it is the Hydra process manager, as most are.

    Args:
        sign: What its `--version` says.
        hostfile: The flag for the file that lists the machines.
        per_machine: The words for the number of processes of a machine, with `{}` in its place.
        variable: The words for a variable, with `{name}` and `{value}` in their places.
    """

    name: str
    sign: str
    hostfile: str = "-f"
    per_machine: tuple[str, ...] = ("-ppn", "{}")
    variable: tuple[str, ...] = ("-genv", "{name}", "{value}")


MAKES: tuple[Make, ...] = (
    Make(
        name="Open MPI",
        sign="Open MPI",
        hostfile="--hostfile",
        per_machine=("--map-by", "ppr:{}:node"),
        variable=("-x", "{name}={value}"),
    ),
    Make(name="Intel MPI", sign="Intel(R) MPI"),
    Make(name="MVAPICH", sign="MVAPICH"),
    Make(name="MPICH", sign="HYDRA"),
)
"""The makes that are known, in the order in which they are looked for."""

# What processes on other machines need besides settings.
_HANDED_ON = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")


def make_of(version: str) -> Make:
    """Return the make whose `--version` this is.

    Example:
        >>> make_of("mpirun (Open MPI) 4.1.4").name
        'Open MPI'
    """
    for make in MAKES:
        if make.sign in version:
            return make
    known = ", ".join(make.name for make in MAKES)
    raise SettingsError(f"mpirun says {version.strip()[:80]!r} of itself: known are {known}.")


def job(plan: LaunchPlan) -> Job:
    """Return the program to become."""
    found = shutil.which("mpirun", path=plan.environ.get("PATH"))
    if found is None or plan.machine.mpirun is None:
        raise MissingDependencyError(
            "mpirun_hostfile asks for mpirun, which is not on the path: install an MPI, such as Open MPI."
        )
    require_script(plan)
    hostfile = plan.merged.settings.mpi.hostfile or ""
    master_variables = {
        "MASTER_ADDR": plan.launch.main_process_ip or first_machine(hostfile),
        "MASTER_PORT": str(choose_port(plan.launch)),
    }
    environ = {**plan.environ, **master_variables}
    line = [found, *arguments(plan, make_of(plan.machine.mpirun), environ)]
    return Job(command=tuple(line), environ=environ)


def arguments(plan: LaunchPlan, make: Make, environ: Mapping[str, str]) -> list[str]:
    """The arguments of `mpirun`."""
    handed_on = [name for name in environ if name in BY_VARIABLE or name in _HANDED_ON]
    variables = [word.format(name=name, value=environ[name]) for name in handed_on for word in make.variable]
    python = [] if plan.launch.no_python else [sys.executable, "-m", "accel_cli.launch.worker"]
    return [
        *("-n", str(plan.launch.num_processes)),
        *(make.hostfile, str(Path(plan.merged.settings.mpi.hostfile or "").expanduser())),
        *(word.format(plan.local_processes) for word in make.per_machine),
        *variables,
        *python,
        *worker_line(plan, aloud=True),
    ]
