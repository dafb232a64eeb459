"""The processes below a launcher: those that it has started, and what they leave behind when they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_GRACE = 5.0  # seconds in which what is left behind may end by itself


def adopt_orphans() -> None:
    """Become the parent of processes that lose theirs below this one, so that `end_descendants` finds them.

    Linux only; elsewhere those in a session of their own get away.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(workers: Sequence[int]) -> None:
    """End what workers have started and left behind."""
    if not workers:
        return
    kill(workers, signal.SIGTERM)
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, deaf = psutil.wait_procs(left, timeout=_GRACE)
    for process in deaf:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def children() -> list[int]:
    """Return the processes that this one has started and that still run."""
    return [child.pid for child in psutil.Process().children()]


def kill(workers: Iterable[int], number: int) -> None:
    """Send a signal to workers and to what they have started, where each has a process group of its own."""
    for worker in workers:
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                os.kill(worker, number)
            else:
                os.killpg(worker, number)
