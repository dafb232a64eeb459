"""Rank and world size from the variables of launchers; free ports.

Torch-free. Every launcher has variables of its own for rank, world size, local rank, local world size and
rendezvous; `LAUNCHERS` is the table of their names.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from accel_state import environ as process_environment
from accel_state import platforms
from accel_state.errors import SettingsError
from accel_state.frozen import frozen

DEFAULT_PORT = 29500
"""The default port of rank 0, as in PyTorch."""


@frozen
class Topology:
    """Rank of this process, world size and nodes of the job. Created once, by `detect`.

    Args:
        launcher: The name of the row of `LAUNCHERS` that matched.

    Example:
        >>> Topology(rank=3, world_size=4).is_last
        True
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "single"

    @property
    def is_main(self) -> bool:
        """Whether this is the first of all processes."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last of all processes."""
        return self.rank == self.world_size - 1


@frozen
class Rendezvous:
    """The address of a job's rendezvous."""

    address: str
    port: int


@frozen
class LauncherEnvironment:
    """The variables of one launcher for rank and world size.

    Args:
        name: Name of the launcher, for messages.
        rank: Variable of the rank. The row applies when it and `world_size` are set.
        world_size: Variable of the number of processes.
        local_rank: Variable of the local rank.
        local_world_size: Variable of the local world size.
        node: Variable of the node's index, for a launcher that lists the local world sizes of all nodes.
        applies: A further condition on the environment.
        address: The address of rank 0, if the launcher provides it.
        job: Variable of the job's name, which is unique on a machine.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    node: str | None = None
    applies: Callable[[Mapping[str, str]], bool] = lambda _: True
    address: Callable[[Mapping[str, str]], str | None] = lambda _: None
    job: str | None = None


def _inside_srun(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process, rather than the batch script or `salloc` shell around it.

    Those two see SLURM_PROCID=0 as well, but belong to one of the steps that Slurm numbers from
    0xFFFFFFFA (https://slurm.schedmd.com/srun.html, output environment variables).
    """
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < 0xFFFFFFFA and environ.get("SLURM_NTASKS", "1") not in {"", "1"}


def first_host(nodelist: str) -> str | None:
    """Return the first host of a Slurm node list.

    Example:
        >>> first_host("gpu[07-09,12],login1")
        'gpu07'
    """
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0]) if match else None


LAUNCHERS: tuple[LauncherEnvironment, ...] = (
    LauncherEnvironment(
        name="torchrun",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_WORLD_SIZE",
    ),
    LauncherEnvironment(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
    ),
    LauncherEnvironment(
        name="MVAPICH",
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    LauncherEnvironment(
        name="Slurm",
        rank="SLURM_PROCID",
        world_size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        local_world_size="SLURM_STEP_TASKS_PER_NODE",
        node="SLURM_NODEID",
        applies=_inside_srun,
        address=lambda environ: first_host(
            environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        ),
        job="SLURM_JOB_ID",
    ),
    LauncherEnvironment(
        name="Intel MPI",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
    ),
)
"""In the order of detection. Slurm comes before Intel MPI, since srun also sets the PMI variables."""


def detect(environ: Mapping[str, str]) -> Topology:
    """Detect rank, world size and nodes from the variables of the launcher.

    Raises:
        SettingsError: If a launcher's variables are not integers, or contradict each other.

    Example:
        >>> detect({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}).launcher
        'torchrun'
        >>> detect({}).world_size
        1
    """
    row = launcher_of(environ)
    if row is None:
        return Topology()
    rank = _number(environ, row.rank)
    world_size = _number(environ, row.world_size)
    if not 0 <= rank < world_size:
        raise SettingsError(
            f"{row.rank}={rank} and {row.world_size}={world_size} in the environment contradict each other: "
            f"ranks go from 0 to {world_size - 1}. Start the job again, or unset both variables."
        )
    local_world_size = _local_world_size(environ, row, world_size)
    local_rank = _number(environ, row.local_rank) if row.local_rank in environ else rank % local_world_size
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        launcher=row.name,
    )


def launcher_of(environ: Mapping[str, str]) -> LauncherEnvironment | None:
    """Return the row of `LAUNCHERS` that matches an environment, or None without a launcher."""
    for row in LAUNCHERS:
        if environ.get(row.rank) and environ.get(row.world_size) and row.applies(environ):
            return row
    return None


def is_launched(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher has started this process as one of several of its node, or torchrun has.

    Otherwise a scheduler's numbers of ranks are those of nodes, one process each.

    Example:
        >>> pod = {"RANK": "0", "WORLD_SIZE": "2"}
        >>> is_launched(pod), is_launched(pod | {"LOCAL_WORLD_SIZE": "2"})
        (False, True)
    """
    row, topology = launcher_of(environ), detect(environ)
    if row is None or topology.world_size == 1:
        return False
    counted = row.local_world_size in environ and topology.local_world_size > 1
    return counted or "TORCHELASTIC_RUN_ID" in environ


def rendezvous(environ: Mapping[str, str], topology: Topology) -> Rendezvous:
    """Return the rendezvous of this job.

    `MASTER_ADDR` and `MASTER_PORT` take precedence over the launcher's variables.

    Raises:
        SettingsError: If rank 0's address is unknown, as under MPI on several nodes.

    Example:
        >>> rendezvous({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2",
        ...             "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        ...            Topology(world_size=2, local_world_size=2, launcher="Open MPI"))
        Rendezvous(address='127.0.0.1', port=29500)
    """
    row = launcher_of(environ)
    address = environ.get("MASTER_ADDR") or (row.address(environ) if row else None)
    if not address and topology.local_world_size == topology.world_size:
        address = "127.0.0.1"
    if not address:
        raise SettingsError(
            f"{topology.launcher} started {topology.world_size} processes on several machines without the "
            "address of rank 0. Set MASTER_ADDR to the host name of rank 0 (and MASTER_PORT to a free port "
            "there) for every process, for example with `mpirun -x MASTER_ADDR=node1 ...`."
        )
    if environ.get("MASTER_PORT"):
        return Rendezvous(address=address, port=_number(environ, "MASTER_PORT"))
    # Jobs on one machine need different ports. The digits of the job's name, modulo a prime since Open MPI
    # numbers jobs in steps of 2 ** 16, give a port below the range of ephemeral ports.
    job = environ.get(row.job, "") if row is not None and row.job is not None else ""
    digits = "".join(re.findall("[0-9]", job))
    return Rendezvous(address=address, port=15000 + int(digits) % 14983 if digits else DEFAULT_PORT)


def check_first_host(environ: Mapping[str, str], topology: Topology) -> None:
    """Check that the launcher's host name for rank 0 resolves; torch would wait for it without a message.

    An address in `MASTER_ADDR` is not checked: the name of a pod, for example, may resolve later.

    Raises:
        SettingsError: If it does not resolve on this node.
    """
    row = launcher_of(environ)
    host = None if row is None or environ.get("MASTER_ADDR") else row.address(environ)
    if host is None:
        return
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise SettingsError(
            f"{topology.launcher} names {host!r} as the node of rank 0, but rank {topology.rank} cannot "
            f"resolve that name ({error}). Set MASTER_ADDR to an address of that node for every process."
        ) from None


def _number(environ: Mapping[str, str], variable: str) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise SettingsError(
            f"{variable}={environ[variable]!r} in the environment is not a whole number. The launcher "
            "sets it. Unset it if this process was not launched."
        ) from None


def _local_world_size(environ: Mapping[str, str], row: LauncherEnvironment, world_size: int) -> int:
    """Return the local world size; a launcher that does not set it is taken to use one node.

    Slurm lists the sizes of all nodes, as `4(x2),3` (https://slurm.schedmd.com/srun.html, output
    environment variables).
    """
    text = environ.get(row.local_world_size, "")
    if not text:
        return world_size
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry)
        if match is None or int(match[1]) < 1:
            raise SettingsError(
                f"{row.local_world_size}={text!r} in the environment is not a positive whole number."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    node = _number(environ, row.node) if row.node is not None and row.node in environ else 0
    return counts[min(node, len(counts) - 1)]


@dataclass(slots=True)
class CPUInformation:
    """Rank and world size of this process, as `get_cpu_distributed_information` returns them."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1


def get_cpu_distributed_information() -> CPUInformation:
    """Read rank and world size from the environment of any launcher.

    Raises:
        SettingsError: As in `detect`.

    Example:
        >>> get_cpu_distributed_information().world_size >= 1
        True
    """
    topology = detect(process_environment.read())
    return CPUInformation(topology.rank, topology.world_size, topology.local_rank, topology.local_world_size)


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a server on this machine listens on a port.

    Args:
        port: From 1 to 65535; the usual port of rank 0 (29500) if None.

    Example:
        >>> is_port_in_use(free_port())
        False
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        try:
            platforms.bind_alone(server, DEFAULT_PORT if port is None else int(port))
        except OSError:
            return True
    return False


def free_port() -> int:
    """Return a TCP port of this machine on which no process listens at present.

    Example:
        >>> 0 < free_port() < 65536
        True
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.bind(("", 0))
        return server.getsockname()[1]


def reserved_port() -> int:
    """Reserve a free TCP port of this machine for the lifetime of this process.

    The reservation survives `exec`. On Linux a socket that never listens stays bound to the port: a server
    that sets SO_REUSEADDR, as torch's store does, can still listen on it. On other systems the port is only
    free at the moment of the call.

    Example:
        >>> 0 < reserved_port() < 65536
        True
    """
    if platforms.SYSTEM != "linux":
        return free_port()
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port: int = holder.getsockname()[1]
    holder.set_inheritable(True)
    holder.detach()  # closed with the process
    return port


def gloo_variables(variables: Mapping[str, str], world_size: int) -> dict[str, str]:
    """Return the variables that gloo starts with, without those that the user has set.

    Each rank then sends two requests to the store for a group, not `2 * world_size + 1`. With more than 64
    ranks, two of them are connected when they first exchange data: addresses for all pairs are bytes in the
    store that grow with the square of the ranks.

    Example:
        >>> gloo_variables({}, 8), list(gloo_variables({}, 65))
        ({'GLOO_ENABLE_STORE_V2_API': '1'}, ['GLOO_ENABLE_STORE_V2_API', 'TORCH_GLOO_LAZY_INIT'])
    """
    chosen = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_SOCKET_IFNAME": gloo_interface(variables)}
    if world_size > 64:
        chosen["TORCH_GLOO_LAZY_INIT"] = "1"
    return {name: value for name, value in chosen.items() if value is not None and name not in variables}


def gloo_interface(variables: Mapping[str, str]) -> str | None:
    """Return the network interface that NCCL uses, for gloo, unless gloo has one of its own.

    gloo binds to the address of the host's name, which is 127.0.1.1 on many Debian and Ubuntu machines: other
    nodes cannot connect to that.

    Example:
        >>> gloo_interface({"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth1"}) is None
        True
    """
    asked = variables.get("NCCL_SOCKET_IFNAME", "")
    if not asked or asked.startswith("^") or "GLOO_SOCKET_IFNAME" in variables:
        return None
    names = asked.removeprefix("=").split(",")
    # NCCL takes prefixes of names, unless they follow "=".
    return next(
        (
            interface
            for _, interface in socket.if_nameindex()
            if (interface in names if asked.startswith("=") else interface.startswith(tuple(names)))
        ),
        None,
    )
