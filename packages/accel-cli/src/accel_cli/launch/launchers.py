"""Table: what each launcher runs."""

from __future__ import annotations

import ast
import shlex
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from accel_cli.launch.hosts import first_machine
from accel_state.errors import AccelError, MissingDependencyError, SettingsError
from accel_state.lazy import Registry
from accel_state.settings import LaunchSettings, to_environ
from accel_state.settings.model import BY_VARIABLE
from accel_state.topology import DEFAULT_PORT, is_port_in_use, reserved_port

if TYPE_CHECKING:
    from accel_cli.launch.checks import LaunchFacts
    from accel_cli.launch.command import LaunchPlan


CommandMaker: TypeAlias = "Callable[[LaunchPlan], Command]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """A way to start the processes of a job; what a distribution registers.

    Args:
        name: The name under which it is registered.
        applies: Whether it can start what was asked for, by what is known of the machine and the settings of
            the launch, whose numbers of processes and machines are decided; pure. A launcher that is used
            only when it is selected asks for `launch.launcher`.
        job: Makes the program to become, or `"module:function"` of what does.
        explain: What happens, as one clause for `--explain`.
        check: A last look before the job runs, which raises a `SettingsError`; not asked by `--explain`.
        environ: Variables that its workers get besides those of the settings.

    Example:
        >>> row = Launcher(name="mine", applies=lambda *_: False, job="my_package:job", explain="…")
        >>> row.check is None
        True
    """

    name: str
    applies: Callable[[LaunchFacts, LaunchSettings], bool]
    job: CommandMaker | str
    explain: str
    check: Callable[[LaunchPlan], None] | None = None
    environ: Callable[[LaunchPlan], Mapping[str, str]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program to become."""

    command: tuple[str, ...]
    environ: Mapping[str, str]


ERROR = 2
"""The exit code of what cannot be carried out, as of the command."""


def run_program(main: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Run a program; return 0, or 2 after an `AccelError`, whose message is printed."""
    try:
        main(arguments)
    except AccelError as error:
        sys.stderr.write(f"accel launch: error: {error}\n")
        return ERROR
    return 0


def simple_command(plan: LaunchPlan) -> Command:
    """Return the program to become."""
    if plan.launch.no_python:
        return Command(command=(program(plan), *plan.script_arguments), environ=plan.environ)
    module = ["-m"] if plan.launch.module else []
    line = (sys.executable, *module, plan.script, *plan.script_arguments)
    return Command(command=line, environ=plan.environ)


def program(plan: LaunchPlan) -> str:
    """Return the program that `--no_python` runs, as a shell would find it."""
    found = shutil.which(plan.script, path=plan.environ.get("PATH"))
    if found is None:
        raise SettingsError(f"--no_python: there is no program {plan.script!r} on the path.")
    return found


def worker_line(plan: LaunchPlan, *, aloud: bool) -> list[str]:
    """Return the command line of one of several processes, which shows its own traceback if `aloud`."""
    if plan.launch.no_python:
        return [program(plan), *plan.script_arguments]
    switches = [*(["--aloud"] if aloud else []), *(["-m"] if plan.launch.module else [])]
    return [*switches, plan.script, *plan.script_arguments]


def require_script(plan: LaunchPlan) -> None:
    """Check that the script exists.

    Raises:
        SettingsError: There is not, or it imports accel where only the command is installed.
    """
    if not (plan.launch.module or plan.launch.no_python or Path(plan.script).exists()):
        raise SettingsError(f"there is no script {plan.script!r} to run.")
    script = Path(plan.script)
    own = (script.with_name("accel"), script.with_name("accel.py"))
    if find_spec("accel") is None and not any(path.exists() for path in own) and _imports_accel(script):
        raise SettingsError(
            f"{plan.script!r} imports accel, which is not installed here, only the command is: "
            "`pip install accel-suite`."
        )


def _imports_accel(script: Path) -> bool:
    """Whether a script imports the library at its top level; what is no Python is left to Python."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    names = [alias.name for one in statements if isinstance(one, ast.Import) for alias in one.names]
    names += [one.module or "" for one in statements if isinstance(one, ast.ImportFrom) and not one.level]
    return any(name.partition(".")[0] == "accel" for name in names)


WORKER = "accel_cli.launch.worker"
"""The module that every rank runs."""

_LOOPBACK = "127.0.0.1"
# Passed on where they are given: torchrun reads its own variables (PET_*) for what is left out.
_PASSED_ON = ("max_restarts", "monitor_interval", "tee", "log_dir", "role")


def torchrun_command(plan: LaunchPlan) -> Command:
    """Return the program to become."""
    require_script(plan)
    quiet = ["--quiet"] if plan.launch.quiet else []
    arguments = torchrun_arguments(plan, requested_port(plan.launch), local_address(plan.launch))
    line = (sys.executable, "-m", "accel_cli.launch.elastic", *quiet, *arguments)
    return Command(command=line, environ=plan.environ)


def local_address(launch: LaunchSettings) -> str | None:
    """Return the address under which the other machines reach this one, if there are others.

    A machine's name need not resolve to it, as in a container or behind a second network card, and torch
    would use the name.
    """
    host = launch.main_process_ip
    if launch.num_machines == 1 or host is None or launch.machine_rank == 0:
        return host
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, DEFAULT_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing: it only chooses the route
            return str(probe.getsockname()[0])
    except OSError:
        return None


def requested_port(launch: LaunchSettings, is_in_use: Callable[[int], bool] = is_port_in_use) -> int | None:
    """Return the port that was asked for, where rank 0 listens; None for any."""
    port = launch.main_process_port
    if port and launch.machine_rank == 0 and is_in_use(port):
        raise SettingsError(
            f"main_process_port {port} of this machine is taken by another process. Choose another, or none "
            "for any free port (on one machine)."
        )
    return port or None


def choose_port(launch: LaunchSettings) -> int:
    """Return the port where rank 0 shall listen, for launchers that cannot choose one themselves."""
    return requested_port(launch) or reserved_port()


def torchrun_arguments(plan: LaunchPlan, port: int | None, address: str | None = None) -> list[str]:
    """Return the arguments of `torch.distributed.run`."""
    launch, defaults = plan.launch, LaunchSettings()
    arguments = {
        "nproc_per_node": plan.local_processes,
        "nnodes": _machines(launch),
        **_torchrun_rendezvous(launch, port, address),
        **{
            name: getattr(launch, name)
            for name in _PASSED_ON
            if plan.merged.source_of(f"launch.{name}").value is not None
        },
    }
    # A log file is where somebody looks for a traceback; and without a summary nobody else would show it.
    aloud = launch.quiet or launch.tee != defaults.tee or launch.log_dir is not None
    return [
        *(f"--{name}={value}" for name, value in arguments.items()),
        *("--module", WORKER),
        *(["--program"] if launch.no_python else []),
        *worker_line(plan, aloud=aloud),
    ]


def _machines(launch: LaunchSettings) -> str:
    if launch.min_machines is None:
        return str(launch.num_machines)
    return f"{launch.min_machines}:{launch.num_machines}"


def _torchrun_rendezvous(launch: LaunchSettings, port: int | None, local: str | None) -> dict[str, object]:
    """Return the arguments of the rendezvous."""
    address = launch.main_process_ip or _LOOPBACK
    conf = {"rdzv_conf": launch.rdzv_conf} if launch.rdzv_conf else {}
    if launch.rdzv_backend == "static" and port is not None:
        return {
            "node_rank": launch.machine_rank,
            "master_addr": address,
            "master_port": port,
            **conf,
        }
    # A static rendezvous cannot listen on any port; that of one machine is otherwise the same.
    backend = "c10d" if launch.rdzv_backend == "static" else launch.rdzv_backend
    if backend == "c10d" and "is_host" not in (launch.rdzv_conf or ""):
        # Otherwise a machine takes itself for the host if its own name resolves to the address, which it
        # need not in a container or behind a second network card.
        is_host = f"is_host={int(launch.machine_rank == 0)}"
        conf = {"rdzv_conf": f"{launch.rdzv_conf},{is_host}" if launch.rdzv_conf else is_host}
    local = local or (address if launch.num_machines == 1 else None)
    return {
        "rdzv_backend": backend,
        "rdzv_endpoint": f"{address}:{port or 0}",
        "rdzv_id": "accel",
        **({} if local is None else {"local_addr": local}),
        **conf,
    }


EACH, ONE = "each", "one"
"""A process for every chip, or one for all of them."""


def xla_command(plan: LaunchPlan, processes: str = EACH) -> Command:
    """Return the program to become: a process for every chip."""
    if plan.launch.no_python:
        raise SettingsError("--no_python: processes on a TPU run a function of a Python script.")
    require_script(plan)
    module = ["-m"] if plan.launch.module else []
    function = plan.merged.settings.tpu.main_training_function
    line = (sys.executable, "-m", "accel_cli.launch.xla_workers", processes, function, *module, plan.script)
    return Command(command=(*line, *plan.script_arguments), environ=plan.environ)


def xla_spmd_command(plan: LaunchPlan) -> Command:
    """Return the program to become: one process, for all chips."""
    return xla_command(plan, ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MpiVendor:
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


MAKES: tuple[MpiVendor, ...] = (
    MpiVendor(
        name="Open MPI",
        sign="Open MPI",
        hostfile="--hostfile",
        per_machine=("--map-by", "ppr:{}:node"),
        variable=("-x", "{name}={value}"),
    ),
    MpiVendor(name="Intel MPI", sign="Intel(R) MPI"),
    MpiVendor(name="MVAPICH", sign="MVAPICH"),
    MpiVendor(name="MPICH", sign="HYDRA"),
)
"""The makes that are known, in the order in which they are looked for."""

# What processes on other machines need besides settings.
_HANDED_ON = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")


def make_of(version: str) -> MpiVendor:
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


def mpi_command(plan: LaunchPlan) -> Command:
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
    line = [found, *mpi_arguments(plan, make_of(plan.machine.mpirun), environ)]
    return Command(command=tuple(line), environ=environ)


def mpi_arguments(plan: LaunchPlan, make: MpiVendor, environ: Mapping[str, str]) -> list[str]:
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


def deepspeed_command(plan: LaunchPlan) -> Command:
    """Return the program to become."""
    require_script(plan)
    port = choose_port(plan.launch)
    line = (sys.executable, "-m", "accel_cli.launch.deepspeed_hosts", *deepspeed_arguments(plan, port))
    return Command(command=line, environ={**plan.environ, **_deepspeed_rendezvous(plan, port)})


def deepspeed_arguments(plan: LaunchPlan, port: int) -> list[str]:
    """Return the arguments of DeepSpeed's launcher, after the variables that the other machines get."""
    hosts, launch = plan.merged.settings.hosts, plan.launch
    exported = [name for name in plan.environ if name in BY_VARIABLE or name == "OMP_NUM_THREADS"]
    exported += _deepspeed_rendezvous(plan, port)
    by_hand = (hosts.launcher or "pdsh") == "nossh"
    return [
        f"--export={','.join(exported)}",
        "--no_local_rank",
        # It takes one that is not there for one machine.
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
        *_worker(plan),
    ]


def _deepspeed_rendezvous(plan: LaunchPlan, port: int) -> dict[str, str]:
    """Return the rendezvous, for the launchers of DeepSpeed that do not set it."""
    if plan.merged.settings.hosts.launcher not in {"openmpi", "slurm"}:
        return {}
    first = next(iter(plan.machine.hosts or {}), "")
    return {"MASTER_ADDR": plan.launch.main_process_ip or first, "MASTER_PORT": str(port)}


def _worker(plan: LaunchPlan) -> list[str]:
    """Return the command line of each process."""
    if plan.launch.no_python:
        return ["--no_python", plan.script, *plan.script_arguments]
    if plan.merged.settings.hosts.launcher == "slurm":  # with which DeepSpeed starts no modules
        module = ["--module"] if plan.launch.module else []
        return [*module, plan.script, *plan.script_arguments]
    return ["--module", "accel_cli.launch.worker", *worker_line(plan, aloud=True)]


def pod_command(plan: LaunchPlan) -> Command:
    """Return the program to become."""
    found = shutil.which("gcloud", path=plan.environ.get("PATH"))
    if found is None:
        raise MissingDependencyError(
            "a TPU pod is reached with gcloud, which is not on the path: install it."
        )
    return Command(command=(found, *pod_arguments(plan)), environ=plan.environ)


def pod_arguments(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `gcloud`."""
    tpu = plan.merged.settings.tpu
    return ssh_arguments(tpu.name, tpu.zone, remote_command(plan), ",".join(tpu.vm) or "all")


def ssh_arguments(name: str | None, zone: str | None, command: str, worker: str = "all") -> list[str]:
    """Return the arguments of `gcloud` that run a command on machines of a pod.

    Raises:
        SettingsError: `gcloud` could take the name for an option.
    """
    if name is not None and name.startswith("-"):
        raise SettingsError(f"tpu_name is {name!r}, which gcloud would take for an option: it is no name.")
    pod = ("compute", "tpus", "tpu-vm", "ssh", name or "", f"--zone={zone or ''}")
    return [*pod, f"--command={command}", f"--worker={worker}"]


def remote_command(plan: LaunchPlan) -> str:
    """Return the command of each machine's shell: those of the configuration, then the script."""
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


# What only torch.distributed.run offers; asked for, one process goes through it as well.
_NEEDS_TORCHRUN = ("rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role", "min_machines")


def _several(facts: LaunchFacts, launch: LaunchSettings) -> bool:
    defaults = LaunchSettings()
    asked = any(getattr(launch, name) != getattr(defaults, name) for name in _NEEDS_TORCHRUN)
    return ((launch.num_processes or 1) > 1 or asked) and not facts.is_worker


def _own_group_variables(plan: LaunchPlan) -> Mapping[str, str]:
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
            job=xla_spmd_command,
            explain="one process drives all chips of this machine, over which the compiler shards",
            environ=_formats_of,
        ),
        Launcher(
            name="xla",
            applies=lambda _, launch: launch.on_tpu,
            job=xla_command,
            explain="torch_xla starts a process for every chip of this machine",
            environ=_formats_of,
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
            applies=_several,
            job=torchrun_command,
            explain="torch.distributed.run starts the processes of this machine",
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
"""The launchers that come with accel, in order: the first that applies is used."""

LAUNCHERS = Registry(group="accel.launchers", kind=Launcher, noun="launcher", built_in=BUILT_IN)
"""All launchers, those of installed distributions first."""


def choose_launcher(facts: LaunchFacts, launch: LaunchSettings) -> Launcher:
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


def command_of_plan(plan: LaunchPlan) -> Command:
    """Make the program that a plan becomes."""
    return LAUNCHERS.resolve(plan.launcher.name, plan.launcher.job)(plan)
