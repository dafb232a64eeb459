"""The launch plan: a pure function of settings and properties of the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from accel_cli.launch.checks import Facts, problems, processes_wanted, uses_cpu
from accel_cli.launch.launchers import choose_launcher
from accel_cli.launch.machine import VISIBLE_DEVICES
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, LaunchSettings, Layer, SourcedValue, merge_sources, worker_environ

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_cli.launch.launcher import Launcher
    from accel_cli.launch.machine import Machine
    from accel_state.settings import Merged


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A launch plan.

    Args:
        environ: The whole environment of each worker.
        merged: All settings, and who decided them.
        launch: How to start it. How many processes and machines is decided.
    """

    launcher: Launcher
    script: str
    script_arguments: tuple[str, ...]
    environ: Mapping[str, str]
    merged: Merged
    launch: LaunchSettings
    machine: Machine

    @property
    def runner(self) -> str:
        """Return the name of the launcher."""
        return self.launcher.name

    @property
    def local_processes(self) -> int:
        """Return the number of processes of this machine."""
        return (self.launch.num_processes or 1) // self.launch.num_machines


PASSED_THROUGH: Mapping[str, SourcedValue] = {
    option.path: SourcedValue(
        value=option.parse(option.launch_default), layer=Layer.DEFAULT, origin="default of accel launch"
    )
    for option in OPTIONS
    if option.launch_default is not None
}
"""Variables that workers get for settings that are not set and whose default differs under `accel launch`."""

_OF_SIZES = "fsdp.min_num_params"  # which the plugin warns of beside another policy


def make_plan(
    merged: Merged,
    script: str,
    script_arguments: tuple[str, ...],
    environ: Mapping[str, str],
    machine: Machine,
) -> LaunchPlan:
    """Make the launch plan.

    Raises:
        SettingsError: Settings contradict each other or do not fit the machine; all that do are named.
    """
    by_size = merged.source_of("fsdp.auto_wrap_policy").value == "SIZE_BASED_WRAP"
    handed_over = {path: one for path, one in PASSED_THROUGH.items() if by_size or path != _OF_SIZES}
    conflicts, merged = merged.conflicts, merge_sources(merged.sourced, handed_over)
    facts = Facts(merged=merged, machine=machine, environ=environ)
    if found := (*conflicts, *problems(facts)):
        raise SettingsError(*found)
    launch = replace(
        merged.settings.launch, num_processes=processes_wanted(facts), num_machines=facts.machines
    )
    settings = replace(merged.settings, process=replace(merged.settings.process, use_cpu=uses_cpu(merged)))
    plan = LaunchPlan(
        launcher=choose_launcher(facts, launch),
        script=script,
        script_arguments=script_arguments,
        environ=worker_environ(settings, environ),
        merged=merged,
        launch=launch,
        machine=machine,
    )
    return replace(plan, environ={**plan.environ, **_added_variables(plan)})


def _added_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return what workers read besides settings: threads, visible devices, and what their launcher adds."""
    launch = plan.launch
    added: dict[str, str] = {}
    if launch.num_cpu_threads_per_process is not None:
        added["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    elif plan.local_processes > 1 and "OMP_NUM_THREADS" not in plan.environ:
        added["OMP_NUM_THREADS"] = str(max(1, plan.machine.cores // plan.local_processes))
    if ids := launch.device_ids:
        added[VISIBLE_DEVICES.get(launch.distributed_type or "", "CUDA_VISIBLE_DEVICES")] = ",".join(ids)
    if plan.machine.gpus > 1 and (launch.num_processes or 1) > 1 and not uses_cpu(plan.merged):
        added |= plan.machine.peer_variables(plan.environ)
    if plan.merged.settings.process.as_accelerate and plan.machine.alias is not None:
        before = plan.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [plan.machine.alias, *(path for path in before if path not in {"", plan.machine.alias})]
        added["PYTHONPATH"] = os.pathsep.join(paths)
    return added if plan.launcher.environ is None else {**added, **plan.launcher.environ(plan)}
