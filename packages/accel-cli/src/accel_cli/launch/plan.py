"""What to run: a pure function from settings and facts about the machine to a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accel_cli.launch.checks import Facts, problems, processes_wanted, uses_cpu
from accel_cli.launch.machine import VISIBLE_DEVICES
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, Given, LaunchSettings, Layer, weigh, worker_environ

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cli.launch.machine import Machine
    from accel_state.settings import Merged


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What to run.

    Args:
        runner: A key of `accel_cli.launch.runners.RUNNERS`.
        script: The script, module or program.
        script_arguments: What it is given.
        environ: The whole environment of each worker.
        merged: All settings, and who decided them.
        launch: How to start it. How many processes and machines is decided.
        machine: What is known about this machine.
    """

    runner: str
    script: str
    script_arguments: tuple[str, ...]
    environ: Mapping[str, str]
    merged: Merged
    launch: LaunchSettings
    machine: Machine

    @property
    def local_processes(self) -> int:
        """How many processes this machine runs."""
        return (self.launch.num_processes or 1) // self.launch.num_machines


PASSED_THROUGH: Mapping[str, Given] = {
    option.path: Given(
        value=option.parse(option.launched), layer=Layer.DEFAULT, origin="default of accel launch"
    )
    for option in OPTIONS
    if option.launched is not None
}
"""What workers are told where nobody says anything, and their own default is another."""

_OF_SIZES = "fsdp.min_num_params"  # which the plugin warns of beside another policy

# What only torch.distributed.run offers; asked for, one process goes through it as well.
_NEEDS_TORCHRUN = ("rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role", "min_machines")


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
        SettingsError: Settings contradict each other or do not fit the machine; all that do are named.
    """
    by_size = merged.source_of("fsdp.auto_wrap_policy").value == "SIZE_BASED_WRAP"
    handed_over = {path: one for path, one in PASSED_THROUGH.items() if by_size or path != _OF_SIZES}
    conflicts, merged = merged.conflicts, weigh(merged.given, handed_over)
    facts = Facts(merged=merged, machine=machine, environ=environ)
    if found := (*conflicts, *problems(facts)):
        raise SettingsError(*found)
    launch = replace(
        merged.settings.launch, num_processes=processes_wanted(facts), num_machines=facts.machines
    )
    runner = next(name for name, applies in _RUNNERS if applies(facts, launch))
    settings = replace(merged.settings, process=replace(merged.settings.process, use_cpu=uses_cpu(merged)))
    plan = LaunchPlan(
        runner=runner,
        script=script,
        script_arguments=script_arguments,
        environ=worker_environ(settings, environ),
        merged=merged,
        launch=launch,
        machine=machine,
    )
    return replace(plan, environ={**plan.environ, **_added_variables(plan)})


def _in_the_cloud(facts: Facts, launch: LaunchSettings) -> bool:
    del facts
    return launch.compute_environment == "AMAZON_SAGEMAKER"


def _on_a_pod(facts: Facts, launch: LaunchSettings) -> bool:
    return launch.on_tpu and facts.settings.tpu.use_cluster


def _on_tpu(facts: Facts, launch: LaunchSettings) -> bool:
    del facts
    return launch.on_tpu


def _by_deepspeed(facts: Facts, launch: LaunchSettings) -> bool:
    del launch
    return facts.reaches_hosts and facts.machines > 1


def _is_worker(facts: Facts, launch: LaunchSettings) -> bool:
    del launch
    return facts.is_worker


def _by_mpi(facts: Facts, launch: LaunchSettings) -> bool:
    del launch
    return facts.settings.mpi.hostfile is not None


def _several(facts: Facts, launch: LaunchSettings) -> bool:
    del facts
    defaults = LaunchSettings()
    return (launch.num_processes or 1) > 1 or any(
        getattr(launch, name) != getattr(defaults, name) for name in _NEEDS_TORCHRUN
    )


def _one(facts: Facts, launch: LaunchSettings) -> bool:
    del facts, launch
    return True


# In order: the first row that applies is chosen.
_RUNNERS: tuple[tuple[str, Callable[[Facts, LaunchSettings], bool]], ...] = (
    ("sagemaker", _in_the_cloud),
    ("pod", _on_a_pod),
    ("xla", _on_tpu),
    ("simple", _is_worker),
    ("deepspeed", _by_deepspeed),
    ("mpirun", _by_mpi),
    ("torchrun", _several),
    ("simple", _one),
)


def _added_variables(plan: LaunchPlan) -> dict[str, str]:
    """What workers read besides settings: threads, visible devices and, for one process, a meeting place."""
    launch = plan.launch
    added: dict[str, str] = {}
    if launch.num_cpu_threads_per_process is not None:
        added["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    elif plan.local_processes > 1 and "OMP_NUM_THREADS" not in plan.environ:
        added["OMP_NUM_THREADS"] = str(max(1, plan.machine.cores // plan.local_processes))
    if ids := launch.device_ids:
        added[VISIBLE_DEVICES.get(launch.distributed_type or "", "CUDA_VISIBLE_DEVICES")] = ",".join(ids)
    if plan.runner == "simple":
        if launch.main_process_ip is not None:
            added["MASTER_ADDR"] = launch.main_process_ip
        if launch.main_process_port:
            added["MASTER_PORT"] = str(launch.main_process_port)
    if plan.runner == "xla" and plan.merged.settings.tpu.downcast_bf16:
        added["XLA_DOWNCAST_BF16"] = "1"
    elif plan.runner == "xla" and plan.merged.settings.precision.mixed_precision == "bf16":
        added["XLA_USE_BF16"] = "1"
    return added
