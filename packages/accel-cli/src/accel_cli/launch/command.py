"""Accel launch: plan, explain, exec."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from accel_cli.arguments import LaunchArguments, help_text, read_arguments
from accel_cli.config_file import ConfigFile, read_config
from accel_cli.launch.checks import LaunchFacts, problems, processes_wanted, uses_cpu
from accel_cli.launch.hosts import VISIBLE_DEVICES, HostDevices, command_lines, probe_devices, read_hosts
from accel_cli.launch.launchers import Command, Launcher, choose_launcher, command_of_plan
from accel_cli.output import Table, redact, show
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import (
    OPTIONS,
    ErrorCollector,
    LaunchSettings,
    Layer,
    Merged,
    Settings,
    SourcedValue,
    merge_sources,
    parse_environ,
    worker_environ,
)
from accel_state.settings.model import BY_PATH, TITLES, parse, value_at
from accel_state.settings.model import as_text as value_text
from accel_state.topology import check_first_host, detect, rendezvous


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
    machine: HostDevices

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
    machine: HostDevices,
) -> LaunchPlan:
    """Make the launch plan.

    Raises:
        SettingsError: Settings contradict each other or do not fit the machine; all that do are named.
    """
    by_size = merged.source_of("fsdp.auto_wrap_policy").value == "SIZE_BASED_WRAP"
    handed_over = {path: one for path, one in PASSED_THROUGH.items() if by_size or path != _OF_SIZES}
    conflicts, merged = merged.conflicts, merge_sources(merged.sourced, handed_over)
    facts = LaunchFacts(merged=merged, machine=machine, environ=environ)
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


def run(arguments: Sequence[str]) -> int:
    """Launch a script by the command line, the environment and the config file.

    Returns:
        0 after help or explanations. Otherwise this process becomes the script, or what starts its workers.
    """
    line = read_arguments(arguments)
    if line.script is None:
        sys.stdout.write(help_text())
        return 0
    plan, notes = plan_of_line(line)
    if line.explain:
        show(*explain(plan, command_of_plan(plan), read(), notes))
        return 0
    return become(job_of(plan, notes))


def plan_of_line(line: LaunchArguments) -> tuple[LaunchPlan, tuple[str, ...]]:
    """Make the launch plan of a command line, the environment and the config file; note translations."""
    assert line.script is not None  # noqa: S101 - for ourselves
    environ = read()
    problems, outside, torchrun = ErrorCollector(), dict[str, SourcedValue](), TorchrunVariables()
    file = ConfigFile()
    with problems:
        outside = parse_environ(environ)
    with problems:
        file = read_config(line.config_file, environ)
    with problems:
        torchrun = parse_torchrun(environ)
    problems.raise_if_any()
    sources = [line.sourced, outside | torchrun.sourced, parse_slurm(environ), file.sourced]
    if torchrun.per_node is not None:
        num_machines = merge_sources(*sources).settings.launch.num_machines
        num_processes = int(str(torchrun.per_node.value)) * num_machines
        sources.append({"launch.num_processes": replace(torchrun.per_node, value=num_processes)})
    merged = merge_sources(*sources)
    machine = probe_host(merged.settings, environ)
    return make_plan(merged, line.script, line.script_arguments, environ, machine), file.notes


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchrunVariables:
    """What the variables of `torch.distributed.run` say.

    Args:
        sourced: Path to value.
        per_node: The number of processes per node; the world size also depends on the number of nodes.
    """

    sourced: dict[str, SourcedValue] = field(default_factory=dict[str, SourcedValue])
    per_node: SourcedValue | None = None


def parse_torchrun(environ: Mapping[str, str]) -> TorchrunVariables:
    """Read nodes, processes and rendezvous from `PET_*`, the variables of `torch.distributed.run`.

    Kubernetes operators such as Kubeflow's start every node of a job with them.

    Raises:
        SettingsError: Variables cannot be read; the message names all.

    Example:
        >>> job = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "node-0:29400"}
        >>> list(parse_torchrun(job).sourced)[2:]
        ['launch.main_process_ip', 'launch.main_process_port']
    """
    least, _, most = environ.get("PET_NNODES", "").rpartition(":")
    per_node = environ.get("PET_NPROC_PER_NODE", "")
    host, _, port = environ.get("PET_RDZV_ENDPOINT", "").partition(":")
    if environ.get("PET_RDZV_BACKEND", "static") == "static":
        host, port = environ.get("PET_MASTER_ADDR") or host, environ.get("PET_MASTER_PORT") or port
    values: dict[str, SourcedValue] = {}
    problems = ErrorCollector()
    for path, variable, text in (
        ("launch.min_machines", "PET_NNODES", least),
        ("launch.num_machines", "PET_NNODES", most),
        ("launch.num_processes", "PET_NPROC_PER_NODE", "" if per_node in _PER_DEVICE else per_node),
        ("launch.machine_rank", "PET_NODE_RANK", environ.get("PET_NODE_RANK", "")),
        ("launch.main_process_ip", "PET_MASTER_ADDR or PET_RDZV_ENDPOINT", host),
        ("launch.main_process_port", "PET_MASTER_PORT or PET_RDZV_ENDPOINT", port),
        *(
            (f"launch.{name}", f"PET_{name.upper()}", environ.get(f"PET_{name.upper()}", ""))
            for name in _AS_NAMED
        ),
    ):
        with problems:
            value = parse(BY_PATH[path], text, Layer.ENVIRONMENT, f"variable {variable}")
            if value is not None:
                values[path] = value
    problems.raise_if_any()
    per_node = values.pop("launch.num_processes", None)
    return TorchrunVariables(sourced=values, per_node=per_node)


_PER_DEVICE = ("auto", "cpu", "gpu", "xpu")  # one process per device, as without the variable
_AS_NAMED = ("rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role")


_SLURM_HOST = "MASTER_ADDR or SLURM_STEP_NODELIST"


def parse_slurm(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read node rank, number of nodes and rendezvous, where `srun` has started one task on each node.

    Where it has started several, each task is a process of training itself, and there is nothing to say.

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
        >>> step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[3-4]"}
        >>> {path: given.value for path, given in parse_slurm(step).items()}["launch.machine_rank"]
        1
    """
    topology = detect(environ)
    if topology.launcher != "Slurm" or topology.world_size == 1 or topology.local_world_size != 1:
        return {}
    master = rendezvous(environ, topology)
    values = {
        "launch.num_machines": (topology.world_size, "SLURM_NTASKS"),
        "launch.machine_rank": (topology.rank, "SLURM_PROCID"),
        "launch.main_process_ip": (master.address, _SLURM_HOST),
        "launch.main_process_port": (master.port, "MASTER_PORT or SLURM_JOB_ID"),
    }
    return {
        path: SourcedValue(value=value, layer=Layer.ENVIRONMENT, origin=f"variable {name}")
        for path, (value, name) in values.items()
    }


def job_of(plan: LaunchPlan, notes: Sequence[str] = ()) -> Command:
    """Take the last look before a plan is run, and tell the notes."""
    job = command_of_plan(plan)
    if plan.merged.source_of("launch.main_process_ip").origin == f"variable {_SLURM_HOST}":
        check_first_host(plan.environ, detect(plan.environ))
    if plan.launcher.check is not None:
        plan.launcher.check(plan)
    for note in notes:
        sys.stderr.write(f"accel launch: note: {note}\n")
    return job


def probe_host(settings: Settings, environ: Mapping[str, str]) -> HostDevices:
    """Probe this machine, and the files and programs that the settings name."""
    machine, hosts = probe_devices(environ), settings.hosts
    if settings.deepspeed is not None and hosts.hostfile:
        machine = replace(machine, hosts=read_hosts(hosts.hostfile, hosts.inclusion, hosts.exclusion))
    if settings.mpi.hostfile is not None:
        machine = replace(machine, mpirun=_mpirun(environ))
    if settings.tpu.command_file is not None and settings.tpu.use_cluster:
        machine = replace(machine, commands=tuple(command_lines(settings.tpu.command_file, "command_file")))
    return machine


def explain(
    plan: LaunchPlan, job: Command, environ: Mapping[str, str], notes: Sequence[str] = ()
) -> list[Table | str]:
    """Return what would be run, and why."""
    return [
        Table(head=("setting", "value", "comes from"), rows=tuple(_settings_table(plan))),
        f"\nway: {plan.launcher.explain}",
        f"\ncommand:\n  {shlex.join(job.command)}",
        "\n  ".join(["\nenvironment, as far as it differs:", *_differences(environ, job.environ)]),
        *(f"\nnote: {note}" for note in notes),
    ]


def _settings_table(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    """Return every setting that has a source, and the number of processes, which is decided in any case."""
    rows: list[tuple[str, str, str]] = []
    for option in OPTIONS:
        source_of = plan.merged.source_of(option.path)
        if option.path == "launch.num_processes":
            origin = source_of.origin if source_of.value is not None else "this machine"
            rows.append((option.path, str(plan.launch.num_processes), origin))
        elif source_of.value is not None:
            value = value_at(plan.merged.settings, option.path)
            off = option.section in TITLES and not value_at(plan.merged.settings, option.section)
            text = redact(option.path, value_text(source_of.value if value is None else value))
            if not off:
                rows.append((option.path, text, source_of.origin))
            elif option.name and source_of.layer < 3:
                rows.append(
                    (
                        option.path,
                        value_text(source_of.value),
                        f"{source_of.origin}; not used: no {TITLES[option.section]}",
                    )
                )
    return rows


def _differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    changed = [
        f"{name}={shown if (shown := redact(name, value)) != value else shlex.quote(value)}"
        for name, value in after.items()
        if before.get(name) != value
    ]
    return [*changed, *(f"unset {name}" for name in before if name not in after)] or ["(nothing)"]


def become(job: Command) -> int:
    """Replace this process by another program, so that signals, exit code and streams are its own.

    Windows can only start the program, wait for it and hand on its exit code.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform != "win32":
        os.execve(job.command[0], list(job.command), dict(job.environ))  # noqa: S606 - no shell is wanted
    return subprocess.run(job.command, env=dict(job.environ), check=False).returncode


def _mpirun(environ: Mapping[str, str]) -> str | None:
    found = shutil.which("mpirun", path=environ.get("PATH"))
    if found is None:
        return None
    completed = subprocess.run(
        [found, "--version"], capture_output=True, text=True, check=False, env=dict(environ)
    )
    return completed.stdout + completed.stderr
