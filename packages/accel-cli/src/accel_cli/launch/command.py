"""`accel launch`: create a plan from command line, variables and config file; explain or run it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace

from accel_cli.arguments import LaunchArguments
from accel_cli.config_file import ConfigFile, read_config
from accel_cli.launch.checks import LaunchFacts, count_processes, find_launch_problems, uses_cpu
from accel_cli.launch.hosts import (
    HostDevices,
    mpi_machines,
    probe_devices,
    read_commands,
    read_hosts,
    visible_devices_variable,
)
from accel_cli.launch.launchers import (
    Command,
    Launcher,
    alias_path,
    choose_launcher,
    command_of_plan,
    dry_run,
    say,
    selected_launcher,
)
from accel_cli.output import Table, redact, redact_line, show
from accel_state.environ import patch_environment, read
from accel_state.errors import SettingsError
from accel_state.frozen import frozen
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
from accel_state.settings.model import BY_PATH, TITLES, as_text, parse, value_at
from accel_state.topology import check_first_host, detect, is_launched, launcher_of, rendezvous


@frozen
class LaunchPlan:
    """The decisions about a launch.

    Args:
        environ: The full environment of each worker.
        merged: All settings, with their sources.
        launch: The settings of the launch, with the numbers of processes and nodes resolved.
        config_file: The config file that was passed; None for the default one.
    """

    launcher: Launcher
    script: str
    script_arguments: tuple[str, ...]
    environ: Mapping[str, str]
    merged: Merged
    launch: LaunchSettings
    machine: HostDevices
    config_file: str | None = None

    @property
    def runner(self) -> str:
        """Return the name of the launcher."""
        return self.launcher.name

    @property
    def local_processes(self) -> int:
        """Return the number of processes on this node."""
        return (self.launch.num_processes or 1) // self.launch.num_machines


def run(options: Namespace) -> int:
    """Run `accel launch`.

    Returns:
        0 after an explanation or a dry run. Otherwise this process becomes the script or its launcher.
    """
    line = LaunchArguments.from_options(options)
    plan, notes = plan_launch(line)
    if line.explain:
        show(*explain(plan, command_of_plan(plan), read(), notes))
        return 0
    if line.dry_run:
        show(dry_run(plan))
        return 0
    return become(prepare_command(plan, notes))


def plan_launch(line: LaunchArguments) -> tuple[LaunchPlan, tuple[str, ...]]:
    """Create the launch plan of a command line; return it with notes on a translated config file."""
    environ = read()
    # 1. Read all sources, to report all problems at once.
    problems, variables = ErrorCollector(), dict[str, SourcedValue]()
    file, torchrun = ConfigFile(), dict[str, SourcedValue]()
    with problems:
        variables = parse_environ(environ)
    with problems:
        file = read_config(line.config_file, environ)
    with problems:
        torchrun = parse_torchrun(environ)
    problems.raise_if_any()
    # 2. Merge them, in the order of precedence.
    per_node = torchrun.pop("launch.num_processes", None)  # The number of nodes may come from another source.
    sources = [line.sourced, variables | torchrun, parse_nodes(environ), file.sourced]
    if per_node is not None:
        num_processes = int(str(per_node.value)) * merge_sources(*sources).settings.launch.num_machines
        sources.append({"launch.num_processes": replace(per_node, value=num_processes)})
    merged = merge_sources(*sources)
    # 3. Compare them with this host.
    machine = probe_host(merged.settings, environ)
    plan = make_plan(merged, line.script, line.script_arguments, environ, machine)
    return replace(plan, config_file=line.config_file), file.notes


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

    Example:
        >>> step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
        >>> step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "gpu[3-4]"}
        >>> {path: source.value for path, source in parse_nodes(step).items()}["launch.machine_rank"]
        1
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
    """Create the launch plan.

    Raises:
        SettingsError: Settings contradict each other or do not fit the machine. The message lists all
            problems.
    """
    defaults = dict(LAUNCH_DEFAULTS)
    if merged.source_of("fsdp.auto_wrap_policy").value != "SIZE_BASED_WRAP":
        del defaults["fsdp.min_num_params"]  # The plugin warns if it is combined with another policy.
    conflicts, merged = merged.conflicts, merge_sources(merged.sourced, defaults)
    selected = selected_launcher(merged)
    remote = selected is not None and selected.remote
    facts = LaunchFacts(merged=merged, machine=machine, environ=environ, remote=remote)
    if problems := (*conflicts, *find_launch_problems(facts)):
        raise SettingsError(*problems)
    launch = replace(
        merged.settings.launch, num_processes=count_processes(facts), num_machines=facts.machines
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


LAUNCH_DEFAULTS: Mapping[str, SourcedValue] = {
    option.path: SourcedValue(
        value=option.parse(option.launch_default), layer=Layer.DEFAULT, origin="default of accel launch"
    )
    for option in OPTIONS
    if option.launch_default is not None
}
"""Defaults of settings that differ between `accel launch` and the library, by path."""


def _added_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return variables of workers that are not settings: threads, visible devices, the launcher's."""
    launch = plan.launch
    added: dict[str, str] = {}
    if plan.launcher.remote:  # The command on each node adds them, for its cores and devices.
        return added
    if launch.num_cpu_threads_per_process is not None:
        added["OMP_NUM_THREADS"] = str(launch.num_cpu_threads_per_process)
    elif plan.local_processes > 1 and "OMP_NUM_THREADS" not in plan.environ:
        added["OMP_NUM_THREADS"] = str(max(1, plan.machine.cores // plan.local_processes))
    if ids := launch.device_ids:
        added[visible_devices_variable(plan.machine, launch.distributed_type)] = ",".join(ids)
    if plan.machine.gpus > 1 and (launch.num_processes or 1) > 1 and not uses_cpu(plan.merged):
        added |= plan.machine.peer_variables(plan.environ)
    added |= alias_path(plan)
    return added if plan.launcher.environ is None else {**added, **plan.launcher.environ(plan)}


def prepare_command(plan: LaunchPlan, notes: Sequence[str] = ()) -> Command:
    """Return the checked command of a plan; print the notes."""
    command = command_of_plan(plan)
    if plan.merged.source_of("launch.main_process_ip").origin == f"variable {_SLURM_HOST}":
        check_first_host(plan.environ, detect(plan.environ))
    if plan.launcher.check is not None:
        plan.launcher.check(plan)
    for note in notes:
        say(f"note: {note}")
    return command


def explain(
    plan: LaunchPlan, command: Command, environ: Mapping[str, str], notes: Sequence[str] = ()
) -> list[Table | str]:
    """Return tables and lines that show the command of a plan and the source of each setting."""
    after = command.environ
    differences = [
        f"{name}={shown if (shown := redact(name, value)) != value else shlex.quote(value)}"
        for name, value in after.items()
        if environ.get(name) != value
    ]
    differences += [f"unset {name}" for name in environ if name not in after]
    return [
        Table(head=("setting", "value", "comes from"), rows=tuple(_settings_table(plan))),
        f"\nway: {plan.launcher.explain}",
        f"\ncommand:\n  {shlex.join(redact_line(command.command))}",
        "\n  ".join(["\nenvironment changes:", *(differences or ["(nothing)"])]),
        *(f"\nnote: {note}" for note in notes),
    ]


def _settings_table(plan: LaunchPlan) -> list[tuple[str, str, str]]:
    """Return the rows of settings that have a source, and the number of processes."""
    rows: list[tuple[str, str, str]] = []
    for option in OPTIONS:
        source = plan.merged.source_of(option.path)
        if option.path == "launch.num_processes":
            counted = "the nodes of the job" if plan.launcher.remote else "this machine"
            origin = source.origin if source.value is not None else counted
            rows.append((option.path, str(plan.launch.num_processes), origin))
        elif source.value is not None:
            value = value_at(plan.merged.settings, option.path)
            if option.section not in TITLES or value_at(plan.merged.settings, option.section):
                text = as_text(redact(option.path, source.value if value is None else value))
                rows.append((option.path, text, source.origin))
            elif option.name and source.layer < Layer.DEFAULT:
                origin = f"{source.origin}; not used: no {TITLES[option.section]}"
                rows.append((option.path, as_text(redact(option.path, source.value)), origin))
    return rows


def become(command: Command) -> int:
    """Replace this process by another program, which then receives signals and sets the exit code.

    A command that is a function is called. On Windows the program runs as a child process, and its exit
    code is returned.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if command.call is not None:
        before = read()
        with patch_environment(**{k: v for k, v in command.environ.items() if before.get(k) != v}):
            command.call()
        return 0
    if sys.platform != "win32":
        os.execve(command.command[0], list(command.command), dict(command.environ))  # noqa: S606 - without a shell
    return subprocess.run(command.command, env=dict(command.environ), check=False).returncode
