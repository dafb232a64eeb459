"""The table of launchers, and the entry points that extend it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cli.launch.launcher import Launcher
from accel_cli.launch.run_simple import require_script
from accel_state.errors import SettingsError
from accel_state.registry import Registry
from accel_state.settings import LaunchSettings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cli.launch.checks import Facts
    from accel_cli.launch.job import Job
    from accel_cli.launch.plan import LaunchPlan

# What only torch.distributed.run offers; asked for, one process goes through it as well.
_NEEDS_TORCHRUN = ("rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role", "min_machines")


def _several(facts: Facts, launch: LaunchSettings) -> bool:
    defaults = LaunchSettings()
    asked = any(getattr(launch, name) != getattr(defaults, name) for name in _NEEDS_TORCHRUN)
    return ((launch.num_processes or 1) > 1 or asked) and not facts.is_worker


def _rendezvous(plan: LaunchPlan) -> Mapping[str, str]:
    """Return the rendezvous of a process that starts its own group."""
    launch, found = plan.launch, dict[str, str]()
    if launch.main_process_ip is not None:
        found["MASTER_ADDR"] = launch.main_process_ip
    if launch.main_process_port:
        found["MASTER_PORT"] = str(launch.main_process_port)
    return found


def xla_formats(mixed_precision: str | None, *, downcast: bool) -> dict[str, str]:
    """Return the variables by which torch_xla stores floating numbers as bfloat16.

    Example:
        >>> xla_formats("bf16", downcast=False), xla_formats("no", downcast=True)
        ({'XLA_USE_BF16': '1'}, {})
    """
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16": "1"}


def _formats_of(plan: LaunchPlan) -> Mapping[str, str]:
    settings = plan.merged.settings
    return xla_formats(settings.precision.mixed_precision, downcast=settings.tpu.downcast_bf16)


_PACKAGE = "accel_cli.launch"

BUILT_IN: Mapping[str, Launcher] = {
    row.name: row
    for row in (
        Launcher(
            name="sagemaker",
            applies=lambda _, launch: launch.compute_environment == "AMAZON_SAGEMAKER",
            job=f"{_PACKAGE}.run_sagemaker:job",
            explain="the SageMaker SDK starts a job",
        ),
        Launcher(
            name="pod",
            applies=lambda facts, launch: launch.on_tpu and facts.settings.tpu.use_cluster,
            job=f"{_PACKAGE}.run_pod:job",
            explain="gcloud starts this command on the machines of the pod",
        ),
        Launcher(
            name="xla_spmd",
            applies=lambda facts, _: facts.settings.is_sharded_on_xla,
            job=f"{_PACKAGE}.run_xla:job_of_one",
            explain="one process drives all chips of this machine, over which the compiler shards",
            environ=_formats_of,
        ),
        Launcher(
            name="xla",
            applies=lambda _, launch: launch.on_tpu,
            job=f"{_PACKAGE}.run_xla:job",
            explain="torch_xla starts a process for every chip of this machine",
            environ=_formats_of,
        ),
        Launcher(
            name="deepspeed",
            applies=lambda facts, _: facts.reaches_hosts and facts.machines > 1 and not facts.is_worker,
            job=f"{_PACKAGE}.run_deepspeed:job",
            explain="DeepSpeed's launcher starts the processes of all machines",
        ),
        Launcher(
            name="mpirun",
            applies=lambda facts, _: facts.settings.mpi.hostfile is not None and not facts.is_worker,
            job=f"{_PACKAGE}.run_mpi:job",
            explain="mpirun starts the processes of all machines",
        ),
        Launcher(
            name="torchrun",
            applies=_several,
            job=f"{_PACKAGE}.run_torchrun:job",
            explain="torch.distributed.run starts the processes of this machine",
        ),
        Launcher(
            name="simple",
            applies=lambda facts, launch: (launch.num_processes or 1) == 1 or facts.is_worker,
            job=f"{_PACKAGE}.run_simple:job",
            explain="one process, this one",
            check=require_script,
            environ=_rendezvous,
        ),
    )
}
"""The launchers that come with accel, in order: the first that applies is used."""

LAUNCHERS = Registry(group="accel.launchers", kind=Launcher, noun="launcher", built_in=BUILT_IN)
"""All launchers, those of installed distributions first."""


def choose_launcher(facts: Facts, launch: LaunchSettings) -> Launcher:
    """Return the launcher that was selected, else the first that applies.

    Raises:
        SettingsError: The selected one does not exist, or cannot start what was asked for.
    """
    rows = LAUNCHERS.available()
    fitting = next(row for row in rows.values() if row.applies(facts, launch))
    if launch.launcher is None:
        return fitting
    origin = facts.merged.source_of("launch.launcher").origin
    selected = LAUNCHERS.find(launch.launcher, source=origin)
    if not selected.applies(facts, launch):
        raise SettingsError(
            f"{origin} selects the launcher {selected.name!r} ({selected.explain}), which cannot start what "
            f"was asked for; {fitting.name!r} can ({fitting.explain}): leave the selection out."
        )
    return selected


def job_of_plan(plan: LaunchPlan) -> Job:
    """Make the program that a plan becomes."""
    return LAUNCHERS.resolve(plan.launcher.name, plan.launcher.job)(plan)
