"""The table of launchers: when each applies, what it runs, and how `--explain` shows it."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from accel_cli.output import redact_line
from accel_state.environ import set_environment
from accel_state.errors import MissingDependencyError, SettingsError
from accel_state.frozen import frozen
from accel_state.lazy import Registry
from accel_state.platforms import is_windows
from accel_state.settings import LaunchSettings, to_environ
from accel_state.settings.model import BY_VARIABLE
from accel_state.topology import DEFAULT_PORT, is_port_in_use, reserved_port

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


@frozen
class Launcher:
    """A way to start the processes of a job; distributions can register their own.

    Args:
        name: The name under which it is registered.
        explain: A clause for `--explain` that describes it.
        applies: Whether it can start the requested job; pure. A launcher that must be selected explicitly
            tests `plan.launch.launcher`.
        run: Starts the job and returns its exit code, or replaces this process (`become`). Raises a
            `SettingsError` if the job cannot run.
        show: Returns the job, or the command line, for `--explain` and `--dry_run`, which start nothing.
        environ: Returns variables of its workers in addition to the settings.
        remote: Whether its processes run on other machines, so that the devices of this one do not matter.

    Example:
        >>> row = Launcher(name="mine", explain="…", applies=lambda _: False, run=lambda _: 0, show=str)
        >>> row.remote
        False
    """

    name: str
    explain: str
    applies: Callable[[LaunchPlan], bool]
    run: Callable[[LaunchPlan], int]
    show: Callable[[LaunchPlan], str]
    environ: Callable[[LaunchPlan], Mapping[str, str]] = lambda _: {}
    remote: bool = False


def choose_launcher(plan: LaunchPlan) -> Launcher:
    """Return the launcher that the settings select, else the first that applies."""
    fitting = next(row for row in LAUNCHERS.available().values() if row.applies(plan))
    selected = plan.launcher
    if selected is None:
        return fitting
    if not selected.applies(plan):
        raise SettingsError(
            f"{plan.origin('launch.launcher')} selects the launcher {selected.name!r} ({selected.explain}), "
            f"which cannot start this job, but {fitting.name!r} can ({fitting.explain}): remove the "
            "selection."
        )
    return selected


def become(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Replace this process by another program, which then receives signals and sets the exit code.

    On Windows the program runs as a child process, and its exit code is returned.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if not is_windows():
        os.execve(words[0], list(words), dict(environ))  # noqa: S606 - without a shell
    return subprocess.run(words, env=dict(environ), check=False).returncode


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


def require_library(launcher: str, module: str, title: str, extra: str | None = None) -> None:
    """Check that the library of a launcher is installed."""
    if find_spec(module) is None:
        raise MissingDependencyError(
            f"--launcher {launcher} needs {title}, which is not installed: "
            f"`pip install '{extra or f'accel-cli[{launcher}]'}'`."
        )


def require_program(name: str, what: str, environ: Mapping[str, str]) -> str:
    """Return the path of a program."""
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        raise MissingDependencyError(f"{what}, which is not on the PATH: install it.")
    return path


def require_script(plan: LaunchPlan) -> None:
    """Check that the script exists."""
    if not (plan.launch.module or plan.launch.no_python or Path(plan.script).exists()):
        raise SettingsError(f"the script {plan.script!r} does not exist.")


def script_words(plan: LaunchPlan, *switches: str) -> list[str]:
    """Return the script and its arguments, after switches; of a program that is no Python, without these."""
    if plan.launch.no_python:
        path = shutil.which(plan.script, path=plan.environ.get("PATH"))
        if path is None:
            raise SettingsError(f"--no_python: the program {plan.script!r} is not on the PATH.")
        return [path, *plan.script_arguments]
    return [*switches, *(["-m"] if plan.launch.module else []), plan.script, *plan.script_arguments]


def simple_words(plan: LaunchPlan) -> list[str]:
    """Return the command line of the script itself."""
    return [*([] if plan.launch.no_python else [sys.executable]), *script_words(plan)]


def torchrun_words(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `accel_cli.launch.elastic`."""
    port = requested_port(plan.launch) or (DEFAULT_PORT if plan.num_machines > 1 else None)
    return torchrun_arguments(plan, port, local_address(plan.launch))


def torchrun_arguments(
    plan: LaunchPlan, port: int | None, address: str | None = None, processes: int | None = None
) -> list[str]:
    """Return the arguments of `torch.distributed.run`, optionally after `--quiet`.

    Args:
        plan: The plan.
        port: The port of rank 0, if it is known.
        address: The address of this machine, if it is known.
        processes: The number of processes on this node; by default that of the plan.
    """
    launch, defaults = plan.launch, LaunchSettings()
    nodes = str(launch.num_machines)
    is_ranked = plan.is_set("launch.machine_rank")
    arguments: dict[str, object] = {
        "nproc_per_node": plan.local_processes if processes is None else processes,
        "nnodes": nodes if launch.min_machines is None else f"{launch.min_machines}:{nodes}",
        **torchrun_rendezvous(launch, port, address, is_ranked=is_ranked),
        **{name: getattr(launch, name) for name in _PASSED_ON if plan.is_set(f"launch.{name}")},
    }
    # Users expect tracebacks in a log file, and with --quiet there is no summary that shows them.
    aloud = launch.quiet or launch.tee != defaults.tee or launch.log_dir is not None
    return [
        *(["--quiet"] if launch.quiet else []),
        *(f"--{name}={value}" for name, value in arguments.items()),
        # After the dashes argparse takes no argument of the script for an option of torch.distributed.run.
        *("--module", "--", WORKER),
        *(["--program"] if launch.no_python else []),
        *script_words(plan, *(["--aloud"] if aloud else [])),
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


WORKER = "accel_cli.launch.worker"
"""The module that every rank runs."""

ELASTIC, DEEPSPEED_HOSTS = "accel_cli.launch.elastic", "accel_cli.launch.deepspeed_hosts"
"""The modules around `torch.distributed.run` and DeepSpeed's launcher."""

PER_CHIP, PER_HOST = "each", "one"
"""One process per TPU chip, or one process for all chips of the host."""


def xla_words(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `accel_cli.launch.xla_workers`."""
    if plan.launch.no_python:
        raise SettingsError("--no_python: processes on a TPU run a function of a Python script.")
    processes = PER_HOST if plan.settings.is_sharded_on_xla else PER_CHIP
    return [processes, plan.settings.tpu.main_training_function, *script_words(plan)]


def mpi_words(plan: LaunchPlan) -> list[str]:
    """Return `mpirun` with its arguments, of the implementation that is installed."""
    mpirun = require_program("mpirun", "mpirun_hostfile requests mpirun", plan.environ)
    return [mpirun, *mpi_arguments(plan, is_open=is_open_mpi(plan.machine.mpirun or ""))]


def mpi_arguments(plan: LaunchPlan, *, is_open: bool) -> list[str]:
    """Return the arguments of `mpirun`."""
    exported = [name for name in plan.environ if name in BY_VARIABLE or name in _MPI_VARIABLES]
    hostfile = str(Path(plan.settings.mpi.hostfile or "").expanduser())
    if is_open:
        hosts = ["--hostfile", hostfile, "--map-by", f"ppr:{plan.local_processes}:node"]
        variables = [word for name in exported for word in ("-x", name)]  # no value, which others could see
    else:
        hosts = ["-f", hostfile, "-ppn", str(plan.local_processes)]
        variables = ["-genvlist", ",".join(exported)]
    python = [] if plan.launch.no_python else [sys.executable, "-m", WORKER]
    return ["-n", str(plan.num_processes), *hosts, *variables, *python, *script_words(plan, "--aloud")]


_MPI_VARIABLES = ("OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH", "CUDA_VISIBLE_DEVICES")
"""Variables that processes on other machines need in addition to the settings."""


def _master_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return the rendezvous, for launchers that do not set it."""
    hosts = (*plan.machine.mpi_machines, *(plan.machine.hosts or ()), "")
    address = plan.launch.main_process_ip or hosts[0]
    return {"MASTER_ADDR": address, "MASTER_PORT": str(choose_port(plan.launch))}


_HYDRA = ("Intel(R) MPI", "MVAPICH", "HYDRA")
"""What `mpirun --version` of Intel MPI, MVAPICH and MPICH has; their process manager is Hydra."""


def is_open_mpi(version: str) -> bool:
    """Return whether an `mpirun` is that of Open MPI, by the output of its `--version`."""
    if "Open MPI" not in version and not any(sign in version for sign in _HYDRA):
        raise SettingsError(
            f"the version of mpirun is {version.strip()[:80]!r}: supported are Open MPI, Intel MPI, MVAPICH, "
            "MPICH."
        )
    return "Open MPI" in version


def deepspeed_words(plan: LaunchPlan) -> list[str]:
    """Return the arguments of `accel_cli.launch.deepspeed_hosts`: exports, then DeepSpeed's own."""
    hosts, launch = plan.settings.hosts, plan.launch
    needs_master = hosts.launcher in _WITHOUT_MASTER
    exported = [name for name in plan.environ if name in BY_VARIABLE or name == "OMP_NUM_THREADS"]
    exported += ["MASTER_ADDR", "MASTER_PORT"] if needs_master else []
    port = plan.environ["MASTER_PORT"] if needs_master else str(choose_port(launch))
    by_hand = ["--no_ssh", "--node_rank", str(launch.machine_rank)]
    worker = ["--module", WORKER, *script_words(plan, "--aloud")]
    if launch.no_python:
        worker = ["--no_python", plan.script, *plan.script_arguments]
    elif hosts.launcher == "slurm":  # DeepSpeed cannot start modules with srun.
        worker = [*(["--module"] if launch.module else []), plan.script, *plan.script_arguments]
    return [
        f"--export={','.join(exported)}",
        "--no_local_rank",
        # DeepSpeed treats a missing hostfile as a single machine.
        *("--hostfile", str(Path(hosts.hostfile or "").expanduser())),
        *(by_hand if hosts.launcher == "nossh" else ["--launcher", hosts.launcher or "pdsh"]),
        *(["--include", hosts.inclusion] if hosts.inclusion else []),
        *(["--exclude", hosts.exclusion] if hosts.exclusion else []),
        *(["--master_addr", launch.main_process_ip] if launch.main_process_ip else []),
        *("--master_port", port),
        *worker,
    ]


_WITHOUT_MASTER = ("openmpi", "slurm")
"""The launchers of DeepSpeed that do not set the rendezvous."""


def run_pod(plan: LaunchPlan) -> int:
    """Run `accel launch` on all machines of the pod; the variables of `tpu_env` go there in a file."""
    gcloud = require_program("gcloud", "a TPU pod needs gcloud", plan.environ)
    with tempfile.TemporaryDirectory(prefix="accel-pod-") as folder:
        path = Path(folder) / f".{Path(folder).name}"
        if plan.settings.tpu.env:
            path.touch(mode=0o600)
            path.write_text(
                "".join(f"export {shlex.quote(variable)}\n" for variable in plan.settings.tpu.env)
            )
            copy = [gcloud, *copy_arguments(plan, path)]
            if code := subprocess.run(copy, env=dict(plan.environ), check=False).returncode:
                return code
    return become([gcloud, *pod_arguments(plan, path.name)], plan.environ)


def show_pod(plan: LaunchPlan) -> str:
    """Return the command lines of `run_pod`."""
    path = Path(".accel-pod-variables")
    lines = [copy_arguments(plan, path)] if plan.settings.tpu.env else []
    return " && ".join(
        shlex.join(redact_line(["gcloud", *line])) for line in [*lines, pod_arguments(plan, path.name)]
    )


def copy_arguments(plan: LaunchPlan, path: Path) -> list[str]:
    """Return the arguments of `gcloud` that copy a file to the home folders of the machines."""
    *_, zone, _, worker = pod_arguments(plan, path.name)
    pod = f"{plan.settings.tpu.name}:{path.name}"
    return [*("compute", "tpus", "tpu-vm", "scp"), str(path), pod, zone, worker]


def pod_arguments(plan: LaunchPlan, file: str) -> list[str]:
    """Return the arguments of `gcloud` that run the configured commands, then `accel launch`.

    The file has the variables of `tpu_env`.
    """
    tpu, variables = plan.settings.tpu, to_environ(plan.settings)
    before = [
        *(["sudo"] if tpu.use_sudo else []),
        *(["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []),
    ]
    line = [
        *("accel", "launch", "--tpu", "--no_tpu_cluster"),
        *("--main_training_function", tpu.main_training_function),
        *(["--downcast_bf16"] if tpu.downcast_bf16 else []),
        *script_words(plan),
    ]
    command = shlex.join([*before, *line])
    if tpu.env:  # which no list of processes shows
        reading = ["sh", "-c", '. "$0" && rm -f "$0" && exec "$@"']
        command = f'{shlex.join([*before, *reading])} "$HOME"/{file} {shlex.join(line)}'
    commands = "; ".join([*(plan.machine.commands or tpu.commands), command])
    return ssh_arguments(tpu.name, tpu.zone, commands, ",".join(tpu.vm) or "all")


def ssh_arguments(name: str | None, zone: str | None, command: str, worker: str = "all") -> list[str]:
    """Return the arguments of `gcloud` that run a command on machines of a pod."""
    if name is not None and name.startswith("-"):
        raise SettingsError(
            f"tpu_name is {name!r}, which gcloud would read as an option: it is not a valid name."
        )
    pod = ("compute", "tpus", "tpu-vm", "ssh", name or "", f"--zone={zone or ''}")
    return [*pod, f"--command={command}", f"--worker={worker}"]


def _needs_torchrun(plan: LaunchPlan) -> bool:
    launch, defaults = plan.launch, LaunchSettings()
    is_requested = any(getattr(launch, name) != getattr(defaults, name) for name in _NEEDS_TORCHRUN)
    return (plan.num_processes > 1 or is_requested) and not plan.is_worker


_NEEDS_TORCHRUN = ("rdzv_conf", "max_restarts", "monitor_interval", "tee", "log_dir", "role", "min_machines")
"""Settings that need torch.distributed.run even for a single process."""


def _known(variables: Mapping[str, object]) -> dict[str, str]:
    """Return the variables that have a value."""
    return {name: str(value) for name, value in variables.items() if value not in {None, ""}}


def _aws_variables(plan: LaunchPlan) -> dict[str, str]:
    """Return the keys of a job on SageMaker in the variables that AWS reads."""
    cloud = plan.settings.sagemaker
    keys = {
        "AWS_ACCESS_KEY_ID": cloud.aws_access_key_id,
        "AWS_SECRET_ACCESS_KEY": cloud.aws_secret_access_key,
        "AWS_PROFILE": cloud.profile,
        "AWS_DEFAULT_REGION": cloud.region,
    }
    return _known(keys)


def xla_formats(mixed_precision: str | None, *, downcast: bool) -> dict[str, str]:
    """Return the variable that makes torch_xla store floating-point numbers as bfloat16."""
    if mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if downcast else "XLA_USE_BF16": "1"}


def _by_words(
    name: str,
    explain: str,
    applies: Callable[[LaunchPlan], bool],
    words: Callable[[LaunchPlan], list[str]],
    *,
    module: str | None = None,
    environ: Callable[[LaunchPlan], Mapping[str, str]] = lambda _: {},
) -> Launcher:
    """Return the row of a command line: of a program, or the arguments of a module that imports torch."""

    def line(plan: LaunchPlan) -> list[str]:
        return [*([] if module is None else [sys.executable, "-m", module]), *words(plan)]

    def run(plan: LaunchPlan) -> int:
        require_script(plan)
        if module is None:
            return become(line(plan), plan.environ)
        arguments = words(plan)
        set_environment(plan.environ)
        return import_module(module).main(arguments)

    def show(plan: LaunchPlan) -> str:
        return shlex.join(redact_line(line(plan)))

    return Launcher(name=name, explain=explain, applies=applies, run=run, show=show, environ=environ)


_on_xla = partial(
    _by_words,
    words=xla_words,
    module="accel_cli.launch.xla_workers",
    environ=lambda plan: xla_formats(
        plan.settings.precision.mixed_precision, downcast=plan.settings.tpu.downcast_bf16
    ),
)


def _by_module(
    name: str,
    explain: str,
    applies: Callable[[LaunchPlan], bool] | None = None,
    *,
    environ: Callable[[LaunchPlan], Mapping[str, str]] = lambda _: {},
) -> Launcher:
    """Return the row of a module of its name with `run` and `show`, which is imported when one is called.

    Without `applies` it starts processes on other machines, and is only used if it is selected.
    """
    load: Callable[[], Any] = partial(import_module, f"accel_cli.launch.{name}")
    return Launcher(
        name=name,
        explain=explain,
        applies=applies or (lambda plan: plan.launch.launcher == name),
        run=lambda plan: load().run(plan),
        show=lambda plan: load().show(plan),
        environ=environ,
        remote=applies is None,
    )


BUILT_IN: Mapping[str, Launcher] = {
    row.name: row
    for row in (
        _by_module(
            "sagemaker",
            "the SageMaker SDK starts a job",
            lambda plan: plan.launch.compute_environment == "AMAZON_SAGEMAKER",
            environ=_aws_variables,
        ),
        Launcher(
            name="pod",
            explain="gcloud starts this command on the machines of the pod",
            applies=lambda plan: plan.launch.on_tpu and plan.settings.tpu.use_cluster,
            run=run_pod,
            show=show_pod,
        ),
        _on_xla(
            "xla_spmd",
            "one process drives all chips of this machine, and the compiler shards over them",
            lambda plan: plan.settings.is_sharded_on_xla,
        ),
        _on_xla(
            "xla",
            "torch_xla starts a process for every chip of this machine",
            lambda plan: plan.launch.on_tpu,
        ),
        _by_module("slurm", "a Slurm job runs this command on each of its nodes"),
        _by_module("ray", "an actor of Ray runs this command on each node, in a placement group"),
        _by_module("kubeflow", "pods of a Kubernetes job run this command"),
        _by_module(
            "replicas",
            "an elastic agent starts each replica group, and torchft tracks which are alive",
            lambda plan: (
                plan.settings.replicas.groups > 1
                and not plan.is_set("replicas.group")  # whose processes this command starts
                and not plan.is_worker
            ),
        ),
        _by_words(
            "deepspeed",
            "DeepSpeed's launcher starts the processes of all machines",
            lambda plan: plan.reaches_hosts and plan.num_machines > 1 and not plan.is_worker,
            deepspeed_words,
            module=DEEPSPEED_HOSTS,
            environ=lambda plan: (
                _master_variables(plan) if plan.settings.hosts.launcher in _WITHOUT_MASTER else {}
            ),
        ),
        _by_words(
            "mpirun",
            "mpirun starts the processes of all machines",
            lambda plan: plan.settings.mpi.hostfile is not None and not plan.is_worker,
            mpi_words,
            environ=_master_variables,
        ),
        _by_words(
            "torchrun",
            "torch.distributed.run starts the processes of this machine",
            _needs_torchrun,
            torchrun_words,
            module=ELASTIC,
            # The argument that newer versions of torch.distributed.run have.
            environ=lambda plan: _known({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": plan.launch.shutdown_timeout}),
        ),
        _by_words(
            "simple",
            "one process, this one",
            lambda plan: plan.num_processes == 1 or plan.is_worker,
            simple_words,
            environ=lambda plan: _known(
                {
                    "MASTER_ADDR": plan.launch.main_process_ip,
                    "MASTER_PORT": plan.launch.main_process_port or None,
                }
            ),
        ),
    )
}
"""The built-in launchers, in order: the first that applies is used."""

LAUNCHERS = Registry(group="accel.launchers", kind=Launcher, noun="launcher", built_in=BUILT_IN)
"""All launchers, with those of installed distributions first."""
