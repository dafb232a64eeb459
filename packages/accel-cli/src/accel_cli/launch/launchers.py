"""The table of launchers: when each applies, and the command line that it runs."""

from __future__ import annotations

import ast
import contextlib
import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from accel_cli.main import ERROR
from accel_state.errors import AccelError, MissingDependencyError, SettingsError
from accel_state.frozen import frozen
from accel_state.lazy import Registry
from accel_state.settings import LaunchSettings, to_environ
from accel_state.settings.model import BY_VARIABLE
from accel_state.topology import DEFAULT_PORT, is_port_in_use, reserved_port

if TYPE_CHECKING:
    from accel_cli.launch.checks import LaunchFacts
    from accel_cli.launch.command import LaunchPlan
    from accel_state.settings import Merged


@frozen
class Launcher:
    """A way to start the processes of a job; distributions can register their own.

    Args:
        name: The name under which it is registered.
        applies: Whether it can start the requested job, from the facts of the host and the settings of the
            launch, whose numbers of processes and nodes are resolved; pure. A launcher that must be
            selected explicitly tests `launch.launcher`.
        job: Creates the program to run, or the `"module:function"` that does.
        explain: A clause for `--explain` that describes it.
        check: Raises a `SettingsError` if the job cannot run; not called by `--explain`.
        environ: Returns variables of its workers in addition to the settings.
        remote: Whether its processes run on other machines, so that the devices of this one do not matter.
        dry_run: Returns the job to submit, for `--dry_run`; `None` for the command line.

    Example:
        >>> row = Launcher(name="mine", applies=lambda *_: False, job="my_package:job", explain="…")
        >>> row.check is None
        True
    """

    name: str
    applies: Callable[[LaunchFacts, LaunchSettings], bool]
    job: Callable[[LaunchPlan], Command] | str
    explain: str
    check: Callable[[LaunchPlan], None] | None = None
    environ: Callable[[LaunchPlan], Mapping[str, str]] | None = None
    remote: bool = False
    dry_run: Callable[[LaunchPlan], str] | str | None = None


@contextlib.contextmanager
def handle_signals(
    names: Sequence[str], handler: Callable[[int, FrameType | None], object]
) -> Generator[None]:
    """Handle signals within the block, except signals that nohup or a shell has set to be ignored.

    Args:
        names: Names of signals; signals that the platform lacks are skipped.
        handler: Called with the number of the signal and the interrupted frame.
    """
    numbers = [number for name in names if (number := getattr(signal, name, None)) is not None]
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
"""The signals that end a job."""


def say(text: str) -> None:
    """Write a line about the launch to the standard error."""
    sys.stderr.write(f"accel launch: {text}\n")
    sys.stderr.flush()


@frozen
class Command:
    """The program that replaces this process.

    Args:
        command: Its words.
        environ: Its environment.
        call: The function that is called in this process in place of the program; `command` describes it.
    """

    command: tuple[str, ...]
    environ: Mapping[str, str]
    call: Callable[[], object] | None = None


def choose_launcher(facts: LaunchFacts, launch: LaunchSettings) -> Launcher:
    """Return the selected launcher, else the first that applies.

    Raises:
        SettingsError: The selected launcher does not exist, or cannot start the requested job.
    """
    rows = LAUNCHERS.available()
    fitting = next(row for row in rows.values() if row.applies(facts, launch))
    selected = selected_launcher(facts.merged)
    if selected is None:
        return fitting
    origin = facts.merged.source_of("launch.launcher").origin
    if not selected.applies(facts, launch):
        raise SettingsError(
            f"{origin} selects the launcher {selected.name!r} ({selected.explain}), which cannot start "
            f"this job, but {fitting.name!r} can ({fitting.explain}): remove the selection."
        )
    return selected


def selected_launcher(merged: Merged) -> Launcher | None:
    """Return the launcher selected by the settings; None if none is selected.

    Raises:
        SettingsError: The launcher does not exist.
    """
    name = merged.settings.launch.launcher
    if name in {None, "auto"}:
        return None
    return LAUNCHERS.find(str(name), source=merged.source_of("launch.launcher").origin)


def command_of_plan(plan: LaunchPlan) -> Command:
    """Return the program of a plan."""
    return LAUNCHERS.resolve(plan.launcher.name, plan.launcher.job)(plan)


def dry_run(plan: LaunchPlan) -> str:
    """Return the job that a plan would submit, or the command line that it would run."""
    row = plan.launcher
    if row.dry_run is None:
        return shlex.join(command_of_plan(plan).command)
    return LAUNCHERS.resolve(row.name, row.dry_run)(plan)


def alias_path(plan: LaunchPlan) -> dict[str, str]:
    """Return the PYTHONPATH by which `import accelerate` imports accel, if requested."""
    if not plan.merged.settings.process.as_accelerate or plan.machine.alias is None:
        return {}
    paths = [plan.machine.alias, *plan.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}


def simple_command(plan: LaunchPlan) -> Command:
    """Return the script itself as the program."""
    if plan.launch.no_python:
        return Command(command=(find_program(plan), *plan.script_arguments), environ=plan.environ)
    module = ["-m"] if plan.launch.module else []
    line = (sys.executable, *module, plan.script, *plan.script_arguments)
    return Command(command=line, environ=plan.environ)


def find_program(plan: LaunchPlan) -> str:
    """Return the path of the program that `--no_python` runs, as a shell would find it."""
    path = shutil.which(plan.script, path=plan.environ.get("PATH"))
    if path is None:
        raise SettingsError(f"--no_python: the program {plan.script!r} is not on the PATH.")
    return path


def require_script(plan: LaunchPlan) -> None:
    """Check that the script exists.

    Raises:
        SettingsError: The script does not exist, or imports accel while only the command is installed.
    """
    if not (plan.launch.module or plan.launch.no_python or Path(plan.script).exists()):
        raise SettingsError(f"the script {plan.script!r} does not exist.")
    script = Path(plan.script)
    siblings = (script.parent / "accel", script.parent / "accel.py")
    if (
        find_spec("accel") is None
        and not any(path.exists() for path in siblings)
        and _has_accel_import(script)
    ):
        raise SettingsError(
            f"{plan.script!r} imports accel, but only the command is installed: `pip install accel-suite`."
        )


def _has_accel_import(script: Path) -> bool:
    """Return whether a script imports the library at its top level; False if it cannot be parsed."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    for statement in statements:
        names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
        if isinstance(statement, ast.ImportFrom) and not statement.level:
            names = [statement.module or ""]
        if any(name.partition(".")[0] == "accel" for name in names):
            return True
    return False


def torchrun_command(plan: LaunchPlan) -> Command:
    """Return `accel_cli.launch.elastic`, with the arguments of `torch.distributed.run`, as the program."""
    require_script(plan)
    quiet = ["--quiet"] if plan.launch.quiet else []
    port = requested_port(plan.launch) or (DEFAULT_PORT if plan.launch.num_machines > 1 else None)
    arguments = torchrun_arguments(plan, port, local_address(plan.launch))
    line = (sys.executable, "-m", "accel_cli.launch.elastic", *quiet, *arguments)
    return Command(command=line, environ=plan.environ)


def torchrun_arguments(plan: LaunchPlan, port: int | None, address: str | None = None) -> list[str]:
    """Return the arguments of `torch.distributed.run`."""
    launch, defaults = plan.launch, LaunchSettings()
    arguments: dict[str, object] = {
        "nproc_per_node": plan.local_processes,
        "nnodes": launch.num_machines
        if launch.min_machines is None
        else f"{launch.min_machines}:{launch.num_machines}",
        **torchrun_rendezvous(
            launch, port, address, is_ranked=plan.merged.source_of(_RANK).value is not None
        ),
    }
    for name in _PASSED_ON:
        if plan.merged.source_of(f"launch.{name}").value is not None:
            arguments[name] = getattr(launch, name)
    # Users expect tracebacks in a log file, and with --quiet there is no summary that shows them.
    aloud = launch.quiet or launch.tee != defaults.tee or launch.log_dir is not None
    return [
        *(f"--{name}={value}" for name, value in arguments.items()),
        # After the dashes argparse takes no argument of the script for an option of torch.distributed.run.
        *("--module", "--", WORKER),
        *(["--program"] if launch.no_python else []),
        *worker_line(plan, aloud=aloud),
    ]


_PASSED_ON = ("max_restarts", "monitor_interval", "tee", "log_dir", "role")
"""Settings that are passed on if they are set; torchrun reads its variables (PET_*) for the others."""


def requested_port(launch: LaunchSettings, is_in_use: Callable[[int], bool] = is_port_in_use) -> int | None:
    """Return the requested port of rank 0; None for any port."""
    port = launch.main_process_port
    if port and launch.machine_rank == 0 and is_in_use(port):
        raise SettingsError(
            f"main_process_port {port} of this machine is used by another process. Choose another port, "
            "or omit it to use any free port (on one machine)."
        )
    return port or None


def choose_port(launch: LaunchSettings) -> int:
    """Return the requested port, else one for launchers that cannot choose a port themselves.

    On one machine it is a free one; several have to agree.
    """
    return requested_port(launch) or (DEFAULT_PORT if launch.num_machines > 1 else reserved_port())


def local_address(launch: LaunchSettings) -> str | None:
    """Return the address at which other nodes reach this one; None if unknown.

    torch would use the host name, which may not resolve to this address in a container or with several
    network cards.
    """
    host = launch.main_process_ip
    if launch.num_machines == 1 or host is None:
        return host
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, DEFAULT_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # This sends no packet, it only selects a route.
            address = str(probe.getsockname()[0])
    except OSError:
        return host if launch.machine_rank == 0 else None
    return host if address.startswith("127.") or address == "::1" else address  # the endpoint is this machine


_RANK = "launch.machine_rank"


def torchrun_rendezvous(
    launch: LaunchSettings, port: int | None, local: str | None, *, is_ranked: bool
) -> dict[str, object]:
    """Return the arguments of torchrun's rendezvous.

    Args:
        launch: The settings of the launch.
        port: The port of rank 0, if it is known.
        local: The address of this machine, if it is known.
        is_ranked: Whether the machines are numbered. Else they join in any order, and the machine of the
            endpoint is its host.
    """
    address = launch.main_process_ip or "127.0.0.1"
    conf = {"rdzv_conf": launch.rdzv_conf} if launch.rdzv_conf else {}
    if launch.rdzv_backend == "static" and port is not None:
        return {"node_rank": launch.machine_rank, "master_addr": address, "master_port": port, **conf}
    # A static rendezvous needs a port; on a single machine c10d is otherwise the same.
    backend = "c10d" if launch.rdzv_backend == "static" else launch.rdzv_backend
    if backend == "c10d" and "is_host" not in (launch.rdzv_conf or ""):
        # By default torch checks whether the machine's name resolves to the address, which may fail in a
        # container or with several network cards.
        hosts = launch.machine_rank == 0 if is_ranked or launch.num_machines == 1 else _is_at(address, local)
        is_host = f"is_host={int(hosts)}"
        conf = {"rdzv_conf": f"{launch.rdzv_conf},{is_host}" if launch.rdzv_conf else is_host}
    local = local or (address if launch.num_machines == 1 else None)
    return {
        "rdzv_backend": backend,
        "rdzv_endpoint": f"{address}:{port or 0}",
        **({} if local is None else {"local_addr": local}),
        **conf,
    }


def _is_at(host: str, local: str | None) -> bool:
    """Return whether a host's name resolves to the address of this machine."""
    try:
        return local == host or local in {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False


def worker_line(plan: LaunchPlan, *, aloud: bool) -> list[str]:
    """Return the command line of a rank, which prints its traceback if `aloud`."""
    if plan.launch.no_python:
        return [find_program(plan), *plan.script_arguments]
    switches = [*(["--aloud"] if aloud else []), *(["-m"] if plan.launch.module else [])]
    return [*switches, plan.script, *plan.script_arguments]


WORKER = "accel_cli.launch.worker"
"""The module that every rank runs."""

PER_CHIP, PER_HOST = "each", "one"
"""One process per TPU chip, or one process for all chips of the host."""


def xla_command(plan: LaunchPlan, processes: str = PER_CHIP) -> Command:
    """Return `accel_cli.launch.xla_workers`, which starts a process per chip, as the program."""
    if plan.launch.no_python:
        raise SettingsError("--no_python: processes on a TPU run a function of a Python script.")
    require_script(plan)
    module = ["-m"] if plan.launch.module else []
    function = plan.merged.settings.tpu.main_training_function
    line = (sys.executable, "-m", "accel_cli.launch.xla_workers", processes, function, *module, plan.script)
    return Command(command=(*line, *plan.script_arguments), environ=plan.environ)


def mpi_command(plan: LaunchPlan) -> Command:
    """Return `mpirun` with its arguments as the program."""
    mpirun = shutil.which("mpirun", path=plan.environ.get("PATH"))
    if mpirun is None or plan.machine.mpirun is None:
        raise MissingDependencyError(
            "mpirun_hostfile requests mpirun, which is not on the PATH: install an MPI implementation "
            "such as Open MPI."
        )
    require_script(plan)
    master_variables = {
        "MASTER_ADDR": plan.launch.main_process_ip or plan.machine.mpi_machines[0],
        "MASTER_PORT": str(choose_port(plan.launch)),
    }
    environ = {**plan.environ, **master_variables}
    line = [mpirun, *mpi_arguments(plan, environ, is_open=is_open_mpi(plan.machine.mpirun))]
    return Command(command=tuple(line), environ=environ)


def mpi_arguments(plan: LaunchPlan, environ: Mapping[str, str], *, is_open: bool) -> list[str]:
    """Return the arguments of `mpirun`."""
    exported = [name for name in environ if name in BY_VARIABLE or name in _MPI_VARIABLES]
    hostfile = str(Path(plan.merged.settings.mpi.hostfile or "").expanduser())
    if is_open:
        hosts = ["--hostfile", hostfile, "--map-by", f"ppr:{plan.local_processes}:node"]
        variables = [word for name in exported for word in ("-x", f"{name}={environ[name]}")]
    else:
        hosts = ["-f", hostfile, "-ppn", str(plan.local_processes)]
        variables = [word for name in exported for word in ("-genv", name, environ[name])]
    python = [] if plan.launch.no_python else [sys.executable, "-m", WORKER]
    number = str(plan.launch.num_processes)
    return ["-n", number, *hosts, *variables, *python, *worker_line(plan, aloud=True)]


_MPI_VARIABLES = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
"""Variables that processes on other machines need in addition to the settings."""


_HYDRA = ("Intel(R) MPI", "MVAPICH", "HYDRA")
"""What `mpirun --version` of Intel MPI, MVAPICH and MPICH has; their process manager is Hydra."""


def is_open_mpi(version: str) -> bool:
    """Return whether an `mpirun` is that of Open MPI, by the output of its `--version`.

    Raises:
        SettingsError: It is neither Open MPI nor based on Hydra.

    Example:
        >>> is_open_mpi("mpirun (Open MPI) 4.1.4"), is_open_mpi("HYDRA build details:")
        (True, False)
    """
    if "Open MPI" not in version and not any(sign in version for sign in _HYDRA):
        raise SettingsError(
            f"the version of mpirun is {version.strip()[:80]!r}: supported are Open MPI, Intel MPI, MVAPICH, "
            "MPICH."
        )
    return "Open MPI" in version


def deepspeed_command(plan: LaunchPlan) -> Command:
    """Return `accel_cli.launch.deepspeed_hosts` with its arguments as the program."""
    require_script(plan)
    port = choose_port(plan.launch)
    line = (sys.executable, "-m", "accel_cli.launch.deepspeed_hosts", *deepspeed_arguments(plan, port))
    return Command(command=line, environ={**plan.environ, **deepspeed_rendezvous(plan, port)})


def deepspeed_arguments(plan: LaunchPlan, port: int) -> list[str]:
    """Return the names of the variables to export, then the arguments of DeepSpeed's launcher."""
    hosts, launch = plan.merged.settings.hosts, plan.launch
    exported = [name for name in plan.environ if name in BY_VARIABLE or name == "OMP_NUM_THREADS"]
    exported += deepspeed_rendezvous(plan, port)
    by_hand = (hosts.launcher or "pdsh") == "nossh"
    worker = ["--module", WORKER, *worker_line(plan, aloud=True)]
    if launch.no_python:
        worker = ["--no_python", plan.script, *plan.script_arguments]
    elif hosts.launcher == "slurm":  # DeepSpeed cannot start modules with srun.
        worker = [*(["--module"] if launch.module else []), plan.script, *plan.script_arguments]
    return [
        f"--export={','.join(exported)}",
        "--no_local_rank",
        # DeepSpeed treats a missing hostfile as a single machine.
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
        *worker,
    ]


def deepspeed_rendezvous(plan: LaunchPlan, port: int) -> dict[str, str]:
    """Return the rendezvous, for the launchers of DeepSpeed that do not set it."""
    if plan.merged.settings.hosts.launcher not in {"openmpi", "slurm"}:
        return {}
    first = next(iter(plan.machine.hosts or {}), "")
    return {"MASTER_ADDR": plan.launch.main_process_ip or first, "MASTER_PORT": str(port)}


def pod_command(plan: LaunchPlan) -> Command:
    """Return `gcloud`, which runs `accel launch` on all machines of the pod, as the program."""
    gcloud = shutil.which("gcloud", path=plan.environ.get("PATH"))
    if gcloud is None:
        raise MissingDependencyError("a TPU pod needs gcloud, which is not on the PATH: install it.")
    return Command(command=(gcloud, *pod_arguments(plan)), environ=plan.environ)


def pod_arguments(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `gcloud`."""
    tpu = plan.merged.settings.tpu
    return ssh_arguments(tpu.name, tpu.zone, remote_command(plan), ",".join(tpu.vm) or "all")


def ssh_arguments(name: str | None, zone: str | None, command: str, worker: str = "all") -> list[str]:
    """Return the arguments of `gcloud` that run a command on machines of a pod.

    Raises:
        SettingsError: `gcloud` could parse the name as an option.
    """
    if name is not None and name.startswith("-"):
        raise SettingsError(
            f"tpu_name is {name!r}, which gcloud would read as an option: it is not a valid name."
        )
    pod = ("compute", "tpus", "tpu-vm", "ssh", name or "", f"--zone={zone or ''}")
    return [*pod, f"--command={command}", f"--worker={worker}"]


def remote_command(plan: LaunchPlan) -> str:
    """Return the shell command of each machine: the configured commands, then the script."""
    tpu, launch = plan.merged.settings.tpu, plan.launch
    variables = [*(f"{name}={value}" for name, value in to_environ(plan.merged.settings).items()), *tpu.env]
    line = [
        *(["sudo"] if tpu.use_sudo else []),
        *(["env", *variables] if variables else []),
        *("accel", "launch", "--tpu", "--no_tpu_cluster"),
        *("--main_training_function", tpu.main_training_function),
        *(["--downcast_bf16"] if tpu.downcast_bf16 else []),
        *(["-m"] if launch.module else []),
        plan.script,
        *plan.script_arguments,
    ]
    before = plan.machine.commands or tpu.commands
    return "; ".join([*before, shlex.join(line)])


def run_program(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run a program; return 0, or 2 after an `AccelError`, whose message is printed."""
    try:
        main(arguments)
    except AccelError as error:
        say(f"error: {error}")
        return ERROR
    return 0


def _needs_torchrun(facts: LaunchFacts, launch: LaunchSettings) -> bool:
    defaults = LaunchSettings()
    is_requested = any(getattr(launch, name) != getattr(defaults, name) for name in _NEEDS_TORCHRUN)
    return ((launch.num_processes or 1) > 1 or is_requested) and not facts.is_worker


_NEEDS_TORCHRUN = ("rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role", "min_machines")
"""Settings that need torch.distributed.run even for a single process."""


def _starts_replica_groups(facts: LaunchFacts, launch: LaunchSettings) -> bool:
    """Return whether this command starts replica groups, rather than the processes of one group."""
    del launch
    is_of_group = facts.source_of("replicas.group").value is not None
    return facts.settings.replicas.groups > 1 and not is_of_group and not facts.is_worker


def _own_group_variables(plan: LaunchPlan) -> Mapping[str, str]:
    """Return the rendezvous variables of a single-process group."""
    ip, port = plan.launch.main_process_ip, plan.launch.main_process_port
    return ({} if ip is None else {"MASTER_ADDR": ip}) | ({"MASTER_PORT": str(port)} if port else {})


def _require_sbatch(plan: LaunchPlan) -> None:
    if shutil.which("sbatch", path=plan.environ.get("PATH")) is None:
        raise MissingDependencyError(
            "--launcher slurm submits a job with sbatch, which is not on the PATH: run it on a Slurm "
            "node, or print the job with --dry_run."
        )


def _require_library(name: str, module: str, title: str, _: LaunchPlan) -> None:
    if find_spec(module) is None:
        extra = {"replicas": "accel-plugins[torchft]"}.get(name, f"accel-cli[{name}]")
        raise MissingDependencyError(
            f"--launcher {name} needs {title}, which is not installed: `pip install '{extra}'`."
        )


def _shutdown_variables(plan: LaunchPlan) -> Mapping[str, str]:
    """Return a variable that replaces an argument of newer versions of torch.distributed.run."""
    seconds = plan.launch.shutdown_timeout
    return {} if seconds is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(seconds)}


def xla_formats(mixed_precision: str | None, *, downcast: bool) -> dict[str, str]:
    """Return the variables that make torch_xla store floating-point numbers as bfloat16.

    Example:
        >>> xla_formats("bf16", downcast=False), xla_formats("no", downcast=True)
        ({'XLA_USE_BF16': '1'}, {})
    """
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16": "1"}


def _xla_formats_of(plan: LaunchPlan) -> Mapping[str, str]:
    settings = plan.merged.settings
    return xla_formats(settings.precision.mixed_precision, downcast=settings.tpu.downcast_bf16)


BUILT_IN: Mapping[str, Launcher] = {
    row.name: row
    for row in (
        Launcher(
            name="sagemaker",
            applies=lambda _, launch: launch.compute_environment == "AMAZON_SAGEMAKER",
            job="accel_cli.launch.sagemaker:sagemaker_command",
            explain="the SageMaker SDK starts a job",
        ),
        Launcher(
            name="pod",
            applies=lambda facts, launch: launch.on_tpu and facts.settings.tpu.use_cluster,
            job=pod_command,
            explain="gcloud starts this command on the machines of the pod",
        ),
        Launcher(
            name="xla_spmd",
            applies=lambda facts, _: facts.settings.is_sharded_on_xla,
            job=partial(xla_command, processes=PER_HOST),
            explain="one process drives all chips of this machine, and the compiler shards over them",
            environ=_xla_formats_of,
        ),
        Launcher(
            name="xla",
            applies=lambda _, launch: launch.on_tpu,
            job=xla_command,
            explain="torch_xla starts a process for every chip of this machine",
            environ=_xla_formats_of,
        ),
        Launcher(
            name="slurm",
            applies=lambda _, launch: launch.launcher == "slurm",
            job="accel_cli.launch.slurm:slurm_command",
            explain="a Slurm job runs this command on each of its nodes",
            check=_require_sbatch,
            remote=True,
            dry_run="accel_cli.launch.slurm:batch_script",
        ),
        Launcher(
            name="ray",
            applies=lambda _, launch: launch.launcher == "ray",
            job="accel_cli.launch.ray:ray_command",
            explain="an actor of Ray runs each process, in a placement group",
            check=partial(_require_library, "ray", "ray", "Ray"),
            remote=True,
            dry_run="accel_cli.launch.ray:dry_run",
        ),
        Launcher(
            name="kubeflow",
            applies=lambda _, launch: launch.launcher == "kubeflow",
            job="accel_cli.launch.kubeflow:kubeflow_command",
            explain="pods of a Kubernetes job run this command",
            check=partial(_require_library, "kubeflow", "kubernetes", "the client of Kubernetes"),
            remote=True,
            dry_run="accel_cli.launch.kubeflow:dry_run",
        ),
        Launcher(
            name="replicas",
            applies=_starts_replica_groups,
            job="accel_cli.launch.replicas:replicas_command",
            explain="an elastic agent starts each replica group, and torchft tracks which are alive",
            check=partial(_require_library, "replicas", "torchft", "torchft"),
        ),
        Launcher(
            name="deepspeed",
            applies=lambda facts, _: facts.reaches_hosts and facts.machines > 1 and not facts.is_worker,
            job=deepspeed_command,
            explain="DeepSpeed's launcher starts the processes of all machines",
        ),
        Launcher(
            name="mpirun",
            applies=lambda facts, _: facts.settings.mpi.hostfile is not None and not facts.is_worker,
            job=mpi_command,
            explain="mpirun starts the processes of all machines",
        ),
        Launcher(
            name="torchrun",
            applies=_needs_torchrun,
            job=torchrun_command,
            explain="torch.distributed.run starts the processes of this machine",
            environ=_shutdown_variables,
        ),
        Launcher(
            name="simple",
            applies=lambda facts, launch: (launch.num_processes or 1) == 1 or facts.is_worker,
            job=simple_command,
            explain="one process, this one",
            check=require_script,
            environ=_own_group_variables,
        ),
    )
}
"""The built-in launchers, in order: the first that applies is used."""

LAUNCHERS = Registry(group="accel.launchers", kind=Launcher, noun="launcher", built_in=BUILT_IN)
"""All launchers, with those of installed distributions first."""
