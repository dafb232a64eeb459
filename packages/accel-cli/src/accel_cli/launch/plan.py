"""What to run: a pure function from settings and facts about the machine to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accel_cli.launch.machine import VISIBLE_DEVICES
from accel_state.errors import SettingsError
from accel_state.settings import LaunchSettings, worker_environ

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cli.launch.machine import Machine
    from accel_state.settings import Merged


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to run.

    Args:
        runner: A key of `accel_cli.launch.command.RUNNERS`.
        script: The script, module or program.
        script_arguments: What it is given.
        environ: The whole environment of each worker.
        launch: How to start it. The number of processes is decided.
    """

    runner: str
    script: str
    script_arguments: tuple[str, ...]
    environ: Mapping[str, str]
    launch: LaunchSettings

    @property
    def processes_here(self) -> int:
        """How many processes this machine runs."""
        return (self.launch.num_processes or 1) // self.launch.num_machines


# What only torch.distributed.run offers; asked for, one process goes through it as well.
_NEEDS_TORCHRUN = ("rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role")


def make_plan(
    merged: Merged,
    script: str,
    script_arguments: tuple[str, ...],
    environ: Mapping[str, str],
    machine: Machine,
) -> LaunchPlan:
    """Decide what to run.

    Args:
        merged: The settings, and who decided them.
        script: The script, module or program.
        script_arguments: What it is given.
        environ: The environment of the command.
        machine: What this machine has.

    Raises:
        SettingsError: The settings contradict each other or do not fit the machine.
    """
    cpu = _uses_cpu(merged)
    launch = merged.settings.launch
    processes = _processes(merged, machine, cpu=cpu)
    _check_machines(launch, processes)
    launch = replace(launch, num_processes=processes)
    defaults = LaunchSettings()
    torchrun = processes > 1 or any(
        getattr(launch, name) != getattr(defaults, name) for name in _NEEDS_TORCHRUN
    )
    settings = replace(merged.settings, process=replace(merged.settings.process, use_cpu=cpu))
    plan = LaunchPlan(
        runner="torchrun" if torchrun else "simple",
        script=script,
        script_arguments=script_arguments,
        environ=worker_environ(settings, environ),
        launch=launch,
    )
    return replace(plan, environ={**plan.environ, **_added_variables(plan, machine)})


def _uses_cpu(merged: Merged) -> bool:
    """Whether to compute on the CPU; of `use_cpu` and `distributed_type` the stronger source decides."""
    switch, kind = merged.who("process.use_cpu"), merged.who("launch.distributed_type")
    said = merged.settings.process.use_cpu
    if kind.value == "MULTI_CPU":
        return said or kind.layer < switch.layer or switch.value is None
    if said and kind.value in VISIBLE_DEVICES:
        if kind.layer == switch.layer:
            raise SettingsError(
                f"{switch.origin} asks for the CPU and {kind.origin} for {kind.value}: leave one out."
            )
        return switch.layer < kind.layer
    return said


def _processes(merged: Merged, machine: Machine, *, cpu: bool) -> int:
    launch, kind = merged.settings.launch, merged.who("launch.distributed_type")
    asked, here = launch.num_processes, _devices(merged, machine, cpu=cpu)
    if asked is None:
        return launch.num_machines * here if kind.value != "NO" else 1
    number = merged.who("launch.num_processes")
    if kind.value == "NO" and asked > 1 and number.layer >= kind.layer:
        raise SettingsError(
            f"{number.origin} asks for {asked} processes and {kind.origin} for one ('NO'): change one of "
            "the two."
        )
    return asked


def _devices(merged: Merged, machine: Machine, *, cpu: bool) -> int:
    """How many processes this machine shall run if nobody says: one per device, at least one."""
    if cpu:
        return 1
    ids = _ids(merged.settings.launch)
    if ids:
        return len(ids)
    kind = merged.who("launch.distributed_type")
    if kind.value == "MULTI_GPU" and machine.gpus == 0:
        raise SettingsError(
            f"{kind.origin} asks for GPUs, but this machine shows none: see what `nvidia-smi` and "
            "CUDA_VISIBLE_DEVICES say, or run with --cpu."
        )
    if (
        kind.value in VISIBLE_DEVICES
        and kind.value != "MULTI_GPU"
        and merged.settings.launch.num_processes is None
    ):
        raise SettingsError(
            f"{kind.origin} is {kind.value}, whose devices cannot be counted: give --num_processes."
        )
    return max(1, machine.gpus)


def _check_machines(launch: LaunchSettings, processes: int) -> None:
    if processes % launch.num_machines:
        raise SettingsError(
            f"{processes} processes cannot be divided evenly among {launch.num_machines} machines: "
            "--num_processes counts those of all machines."
        )
    if launch.machine_rank >= launch.num_machines:
        raise SettingsError(
            f"machine rank {launch.machine_rank} is not below the number of machines, "
            f"{launch.num_machines}: ranks start at 0."
        )
    if launch.num_machines > 1 and not (launch.main_process_ip and launch.main_process_port):
        raise SettingsError(
            f"{launch.num_machines} machines need to know where to meet: give --main_process_ip and "
            "--main_process_port, the same on each of them."
        )
    ids = _ids(launch)
    if ids and processes // launch.num_machines > len(ids):
        raise SettingsError(
            f"{processes // launch.num_machines} processes on this machine want a device each, but gpu_ids "
            f"is {launch.gpu_ids!r}."
        )


def _ids(launch: LaunchSettings) -> list[str]:
    text = launch.gpu_ids or "all"
    return [] if text.strip().lower() == "all" else [entry.strip() for entry in text.split(",")]


def _added_variables(plan: LaunchPlan, machine: Machine) -> dict[str, str]:
    """What workers read besides settings: threads, visible devices and, for one process, a meeting place."""
    launch = plan.launch
    added: dict[str, str] = {}
    if launch.num_cpu_threads_per_process is not None:
        added["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    elif plan.processes_here > 1 and "OMP_NUM_THREADS" not in plan.environ:
        added["OMP_NUM_THREADS"] = str(max(1, machine.cores // plan.processes_here))
    if ids := _ids(launch):
        added[VISIBLE_DEVICES.get(launch.distributed_type or "", "CUDA_VISIBLE_DEVICES")] = ",".join(ids)
    if plan.runner == "simple":
        if launch.main_process_ip is not None:
            added["MASTER_ADDR"] = launch.main_process_ip
        if launch.main_process_port:
            added["MASTER_PORT"] = str(launch.main_process_port)
    return added
