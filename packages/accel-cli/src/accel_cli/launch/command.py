"""`accel launch`: create a plan from command line, variables and config file; explain or run it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accel_cli.config_file import ConfigFile, read_config
from accel_cli.launch.checks import find_launch_problems
from accel_cli.launch.hosts import (
    HostDevices,
    mpi_machines,
    probe_devices,
    read_commands,
    read_hosts,
    visible_devices_variable,
)
from accel_cli.launch.launchers import LAUNCHERS, choose_launcher, say
from accel_cli.launch.plan import LaunchPlan, uses_cpu
from accel_cli.output import Table, redact, show
from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.settings import (
    OPTIONS,
    ErrorCollector,
    Layer,
    Merged,
    Settings,
    SourcedValue,
    merge_sources,
    parse_environ,
    worker_environ,
)
from accel_state.settings.model import BY_PATH, TITLES, as_text, parse, value_at
from accel_state.topology import check_first_host, detect, is_launched, launcher_of, rendezvous


def run(options: Namespace) -> int:
    """Run `accel launch`.

    Returns:
        0 after an explanation or a dry run, else the exit code of the job. One process becomes the script.
    """
    plan, notes = plan_launch(options)
    if options.explain:
        show(*explain(plan, read(), notes))
        return 0
    if options.dry_run:
        show(plan.row.show(plan))
        return 0
    if plan.origin("launch.main_process_ip") == f"variable {_SLURM_HOST}":
        check_first_host(plan.environ, detect(plan.environ))
    for note in notes:
        say(f"note: {note}")
    return plan.row.run(plan)


def plan_launch(options: Namespace) -> tuple[LaunchPlan, tuple[str, ...]]:
    """Create the plan of a parsed command line; return it with notes on a translated config file."""
    environ = read()
    # 1. Read all sources, to report all problems at once.
    problems, variables = ErrorCollector(), dict[str, SourcedValue]()
    file, torchrun = ConfigFile(), dict[str, SourcedValue]()
    with problems:
        variables = parse_environ(environ)
    with problems:
        file = read_config(options.config_file, environ)
    with problems:
        torchrun = parse_torchrun(environ)
    problems.raise_if_any()
    # 2. Merge them, in the order of precedence.
    per_node = torchrun.pop("launch.num_processes", None)  # The number of nodes may come from another source.
    sources = [options.settings, variables | torchrun, parse_nodes(environ), file.sourced]
    if per_node is not None:
        num_processes = int(str(per_node.value)) * merge_sources(*sources).settings.launch.num_machines
        sources.append({"launch.num_processes": replace(per_node, value=num_processes)})
    merged = merge_sources(*sources)
    # 3. Compare them with this host.
    machine = probe_host(merged.settings, environ)
    return make_plan(merged, options.script, tuple(options.script_arguments), environ, machine), file.notes


def parse_torchrun(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read nodes, processes per node and rendezvous from torch.distributed.run's variables, `PET_*`.

    Kubernetes operators such as Kubeflow's start every node of a job with them.

    Returns:
        The settings by path; `launch.num_processes` is the number of processes per node.

    Raises:
        SettingsError: Variables are invalid; the message lists all.

    Example:
        >>> job = {"PET_NNODES": "1:2", "PET_RDZV_ENDPOINT": "node-0:29400"}
        >>> list(parse_torchrun(job))[2:]
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
            for name in _LAUNCH_VARIABLES
        ),
    ):
        with problems:
            value = parse(BY_PATH[path], text, Layer.ENVIRONMENT, f"variable {variable}")
            if value is not None:
                values[path] = value
    problems.raise_if_any()
    return values


_PER_DEVICE = ("auto", "cpu", "gpu", "xpu")
"""Values of PET_NPROC_PER_NODE that mean one process per device, the default."""

_LAUNCH_VARIABLES = (
    *("rdzv_backend", "rdzv_conf", "max_restarts", "monitor_interval", "shutdown_timeout"),
    *("tee", "log_dir", "role"),
)
"""Launch settings whose variable is `PET_` followed by their name."""


def parse_nodes(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Read node rank, number of nodes and rendezvous if a scheduler has started this command once per node.

    Slurm, MPI and operators of Kubernetes (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`) do. If several tasks were
    started per node, each task is a rank, and no processes are launched.
    """
    topology, row = detect(environ), launcher_of(environ)
    if row is None or topology.world_size == 1 or is_launched(environ):
        return {}
    on_slurm = row.name == "Slurm"
    if not on_slurm and not environ.get("MASTER_ADDR"):
        return {}  # left over, or the variables of processes that do not need to know each other
    master = rendezvous(environ, topology)
    values = {
        "launch.num_machines": (topology.world_size, row.world_size),
        "launch.machine_rank": (topology.rank, row.rank),
        "launch.main_process_ip": (master.address, _SLURM_HOST if on_slurm else "MASTER_ADDR"),
        "launch.main_process_port": (master.port, f"MASTER_PORT or {row.job}" if row.job else "MASTER_PORT"),
    }
    return {
        path: SourcedValue(value=value, layer=Layer.ENVIRONMENT, origin=f"variable {name}")
        for path, (value, name) in values.items()
    }


_SLURM_HOST = "MASTER_ADDR or SLURM_STEP_NODELIST"


def probe_host(settings: Settings, environ: Mapping[str, str]) -> HostDevices:
    """Probe this machine, and the files and programs referenced by the settings."""
    machine = probe_devices(environ, ask_torch=not settings.process.use_cpu)
    hosts = settings.hosts
    if settings.deepspeed is not None and hosts.hostfile:
        machine = replace(machine, hosts=read_hosts(hosts.hostfile, hosts.inclusion, hosts.exclusion))
    if settings.mpi.hostfile is not None:
        mpirun, output = shutil.which("mpirun", path=environ.get("PATH")), None
        if mpirun is not None:
            done = subprocess.run(
                [mpirun, "--version"], capture_output=True, text=True, check=False, env=dict(environ)
            )
            output = done.stdout + done.stderr
        machine = replace(machine, mpirun=output, mpi_machines=mpi_machines(settings.mpi.hostfile))
    if settings.tpu.command_file is not None and settings.tpu.use_cluster:
        machine = replace(machine, commands=tuple(read_commands(settings.tpu.command_file, "command_file")))
    return machine


def make_plan(
    merged: Merged,
    script: str,
    script_arguments: tuple[str, ...],
    environ: Mapping[str, str],
    machine: HostDevices,
) -> LaunchPlan:
    """Create the launch plan."""
    defaults = dict(LAUNCH_DEFAULTS)
    if merged.source_of("fsdp.auto_wrap_policy").value != "SIZE_BASED_WRAP":
        del defaults["fsdp.min_num_params"]  # The plugin warns if it is combined with another policy.
    conflicts, merged = merged.conflicts, merge_sources(merged.sourced, defaults)
    name = merged.settings.launch.launcher
    plan = LaunchPlan(
        merged=merged,
        machine=machine,
        environ=environ,
        script=script,
        script_arguments=script_arguments,
        launcher=None
        if name in {None, "auto"}
        else LAUNCHERS.find(str(name), source=merged.source_of("launch.launcher").origin),
    )
    if problems := (*conflicts, *find_launch_problems(plan)):
        raise SettingsError(*problems)
    launcher = choose_launcher(plan)
    settings = replace(merged.settings, process=replace(merged.settings.process, use_cpu=uses_cpu(merged)))
    plan = replace(plan, launcher=launcher, environ=worker_environ(settings, environ))
    added = {} if launcher.remote else _local_variables(plan)  # The command on each node adds its own.
    return replace(plan, environ={**plan.environ, **added, **launcher.environ(plan)})


LAUNCH_DEFAULTS: Mapping[str, SourcedValue] = {
    option.path: SourcedValue(
        value=option.parse(option.launch_default), layer=Layer.DEFAULT, origin="default of accel launch"
    )
    for option in OPTIONS
    if option.launch_default is not None
}
"""Defaults of settings that differ between `accel launch` and the library, by path."""


def _local_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return variables of workers that are not settings: threads, visible devices, the alias."""
    launch = plan.launch
    added: dict[str, str] = {}
    if launch.num_cpu_threads_per_process is not None:
        added["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    elif plan.local_processes > 1 and "OMP_NUM_THREADS" not in plan.environ:
        added["OMP_NUM_THREADS"] = str(max(1, plan.machine.cores // plan.local_processes))
    if ids := launch.device_ids:
        added[visible_devices_variable(plan.machine, launch.distributed_type)] = ",".join(ids)
    if plan.machine.gpus > 1 and plan.num_processes > 1 and not uses_cpu(plan.merged):
        added |= plan.machine.peer_variables(plan.environ)
    if plan.settings.process.as_accelerate and plan.machine.alias is not None:
        paths = [plan.machine.alias, *plan.environ.get("PYTHONPATH", "").split(os.pathsep)]
        added["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    return added


def explain(plan: LaunchPlan, environ: Mapping[str, str], notes: Sequence[str] = ()) -> list[Table | str]:
    """Return tables and lines that show the job of a plan and the source of each setting."""
    differences = [
        f"{name}={shown if (shown := redact(name, value)) != value else shlex.quote(value)}"
        for name, value in plan.environ.items()
        if environ.get(name) != value
    ]
    differences += [f"unset {name}" for name in environ if name not in plan.environ]
    return [
        Table(head=("setting", "value", "comes from"), rows=tuple(_settings_table(plan))),
        f"\nway: {plan.row.explain}",
        f"\ncommand:\n  {plan.row.show(plan)}",
        "\n  ".join(["\nenvironment changes:", *(differences or ["(nothing)"])]),
        *(f"\nnote: {note}" for note in notes),
    ]


def _settings_table(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    """Return the rows of settings that have a source, and the number of processes."""
    rows: list[tuple[str, str, str]] = []
    for option in OPTIONS:
        source = plan.source_of(option.path)
        if option.path == "launch.num_processes":
            counted = "the nodes of the job" if plan.remote else "this machine"
            origin = source.origin if source.value is not None else counted
            rows.append((option.path, str(plan.num_processes), origin))
        elif source.value is not None:
            value = value_at(plan.settings, option.path)
            if option.section not in TITLES or value_at(plan.settings, option.section):
                text = as_text(redact(option.path, source.value if value is None else value))
                rows.append((option.path, text, source.origin))
            elif option.name and source.layer < Layer.DEFAULT:
                origin = f"{source.origin}; not used: no {TITLES[option.section]}"
                rows.append((option.path, as_text(redact(option.path, source.value)), origin))
    return rows
