"""TCP ports of this machine: check, find and reserve one. Torch-free."""

from __future__ import annotations

import socket
import sys

from accel_state.topology import DEFAULT_PORT


def is_port_in_use(port: int | str | None = None) -> bool:
    """Return whether a server on this machine listens on a port.

    Args:
        port: From 1 to 65535; the usual port of rank 0 (29500) if None.

    Example:
        >>> is_port_in_use(free_port())
        False
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", DEFAULT_PORT if port is None else int(port)))
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

    That also holds for the program that this process becomes. On Linux a socket stays bound to it that never
    listens: a server that sets SO_REUSEADDR, as torch's store does, can still listen on that
    port. On other systems the port is only free at the moment.

    Example:
        >>> 0 < reserved_port() < 65536
        True
    """
    if sys.platform != "linux":
        return free_port()
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    port: int = holder.getsockname()[1]
    holder.set_inheritable(True)
    holder.detach()  # closed with the process
    return port
