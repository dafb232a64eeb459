"""Several processes: the command of `torch.distributed.run`."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_cli.launch.run_simple import require_script, worker_line
from accel_state.errors import SettingsError
from accel_state.ports import is_port_in_use, reserved_port
from accel_state.settings import LaunchSettings
from accel_state.topology import DEFAULT_PORT

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cli.launch.plan import LaunchPlan

WORKER = "accel_cli.launch.worker"
"""The module that every rank runs."""

_LOOPBACK = "127.0.0.1"
# Passed on where they are given: torchrun reads its own variables (PET_*) for what is left out.
_PASSED_ON = ("max_restarts", "monitor_interval", "tee", "log_dir", "role")


def job(plan: LaunchPlan) -> Job:
    """Return the program to become."""
    require_script(plan)
    quiet = ["--quiet"] if plan.launch.quiet else []
    arguments = torchrun_arguments(plan, requested_port(plan.launch), local_address(plan.launch))
    line = (sys.executable, "-m", "accel_cli.launch.elastic", *quiet, *arguments)
    return Job(command=line, environ=plan.environ)


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
        **_rendezvous(launch, port, address),
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


def _rendezvous(launch: LaunchSettings, port: int | None, local: str | None) -> dict[str, object]:
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
