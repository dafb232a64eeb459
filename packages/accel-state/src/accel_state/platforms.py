"""What operating systems do differently. All of accel asks here, so that a test can plant another system.

`SYSTEM` and the functions of `os` and `signal` that a system lacks are looked up at each call.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

SYSTEM: str = sys.platform
"""`"linux"`, `"darwin"` or `"win32"`."""


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # in <linux/prctl.h>
_POLL_INTERVAL = 1.0  # seconds


def is_windows() -> bool:
    """Return whether processes are not forked, and get no signals, as on Windows."""
    return SYSTEM == "win32"


def can_replace_mapped() -> bool:
    """Return whether a file that is open or mapped can be replaced and deleted: not on Windows."""
    return not is_windows()


_load = functools.cache(ctypes.CDLL)


def libc() -> ctypes.CDLL | None:
    """Return the C library; `None` on systems other than Linux."""
    return _load(None, use_errno=True) if SYSTEM == "linux" else None


def trim_heap() -> None:
    """Return freed memory to the system, if the C library supports it.

    glibc keeps freed memory when large and small blocks were freed alternately.
    """
    trim = getattr(libc(), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


def map_private(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map a file; what is written to the mapping stays in memory."""
    if SYSTEM == "linux":
        # Without a reservation, else the kernel rejects a private mapping larger than its memory.
        flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0x4000)
        return mmap.mmap(descriptor, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)


def create_file(path: Path) -> int:
    """Create a file that does not exist, and return the descriptor that writes its bytes as they are."""
    binary = getattr(os, "O_BINARY", 0)  # without it, Windows writes two bytes for a line feed
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, 0o666)


def flush_file(path: Path) -> None:
    """Flush the contents of a file to disk."""
    mode = "r+b" if is_windows() else "rb"  # Windows flushes no file that is open only for reading
    with path.open(mode, buffering=0) as file:
        os.fsync(file.fileno())


def bind_alone(server: socket.socket, port: int) -> None:
    """Bind a socket to a TCP port of this machine on which no process listens.

    Raises:
        OSError: A process listens on it.
    """
    # On Windows, SO_REUSEADDR would bind to a port in use.
    option: int = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
    server.setsockopt(socket.SOL_SOCKET, option, 1)
    server.bind(("", port))


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, on Linux."""
    library = libc()
    if library is not None:
        library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Kill this process when its parent ends for any reason.

    The signal is SIGKILL: the parent hosts the store of the job, without which no collective ends, and a
    process that waits for other ranks in C++ would not run the handler of another signal. On Linux the
    kernel sends it, also after this process has become another program; elsewhere a thread polls the parent
    once a second. Windows is not supported.

    Args:
        parent: The id of the process that has started this one; if it has ended already, this one ends at
            once.
    """
    if is_windows():
        return
    library = libc()
    if library is not None:
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_kill_after, args=(os.getppid(),), name="accel-parent", daemon=True).start()
    try:
        os.kill(parent, 0)
    except ProcessLookupError:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)
    except PermissionError:  # it is another user's, and alive
        pass


def _kill_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_INTERVAL)
    os.kill(os.getpid(), signal.SIGKILL)


def signal_group(leader: int, number: int) -> None:
    """Send a signal to a process and its group; on Windows to the process only.

    Raises:
        OSError: It has ended.
    """
    if is_windows():
        os.kill(leader, number)
    else:
        os.killpg(leader, number)


def can_wait_for_signals() -> bool:
    """Return whether a thread can wait for a signal and learn who sent it: not on macOS and Windows."""
    return hasattr(signal, "sigwaitinfo")
