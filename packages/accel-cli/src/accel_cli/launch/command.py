"""`accel launch`: become the script, or the launcher of its workers."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from accel_cli.config_file import ConfigFile, read_config
from accel_cli.launch.args import help_text, read_arguments
from accel_cli.launch.hostfile import read_hosts
from accel_cli.launch.launchers import job_of_plan
from accel_cli.launch.machine import Machine, this_machine
from accel_cli.launch.plan import make_plan
from accel_cli.output import Table, show
from accel_cli.redact import redact
from accel_cli.text_file import command_lines
from accel_state.environ import read
from accel_state.settings import OPTIONS, ErrorCollector, Layer, SourcedValue, merge_sources, parse_environ
from accel_state.settings.environ import as_text as value_text
from accel_state.settings.merge import TITLES, parse
from accel_state.settings.model import BY_PATH, value_at
from accel_state.topology import check_first_host, detect, rendezvous

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_cli.launch.args import Arguments
    from accel_cli.launch.job import Job
    from accel_cli.launch.plan import LaunchPlan
    from accel_state.settings import Settings


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
        show(*explain(plan, job_of_plan(plan), read(), notes))
        return 0
    return become(job_of(plan, notes))


def plan_of_line(line: Arguments) -> tuple[LaunchPlan, tuple[str, ...]]:
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


def job_of(plan: LaunchPlan, notes: Sequence[str] = ()) -> Job:
    """Take the last look before a plan is run, and tell the notes."""
    job = job_of_plan(plan)
    if plan.merged.source_of("launch.main_process_ip").origin == f"variable {_SLURM_HOST}":
        check_first_host(plan.environ, detect(plan.environ))
    if plan.launcher.check is not None:
        plan.launcher.check(plan)
    for note in notes:
        sys.stderr.write(f"accel launch: note: {note}\n")
    return job


def probe_host(settings: Settings, environ: Mapping[str, str]) -> Machine:
    """Probe this machine, and the files and programs that the settings name."""
    machine, hosts = this_machine(environ), settings.hosts
    if settings.deepspeed is not None and hosts.hostfile:
        machine = replace(machine, hosts=read_hosts(hosts.hostfile, hosts.inclusion, hosts.exclusion))
    if settings.mpi.hostfile is not None:
        machine = replace(machine, mpirun=_mpirun(environ))
    if settings.tpu.command_file is not None and settings.tpu.use_cluster:
        machine = replace(machine, commands=tuple(command_lines(settings.tpu.command_file, "command_file")))
    return machine


def explain(
    plan: LaunchPlan, job: Job, environ: Mapping[str, str], notes: Sequence[str] = ()
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


def become(job: Job) -> int:
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
