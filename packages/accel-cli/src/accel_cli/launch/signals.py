"""Signals on their way from a launcher to the processes below it, and the end of what these leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from types import FrameType

_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_FORWARDED_SIGNALS = ("SIGUSR1", "SIGUSR2")
_SAME = 0.5  # seconds in which several SIGINT count as one Ctrl-C, since a shell and a terminal both send it
_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_GRACE = 5.0  # seconds in which what is left behind may end by itself
AGAIN = "accel launch: waiting for the processes to end; Ctrl-C ends them at once\n"
"""Printed when a signal asks to end."""


class Relay:
    """Handler of the signals of this process.

    The first signal that asks to end raises an error, upon which torch sends it to the workers and waits.
    Ctrl-C after that kills them. User signals (SIGUSR1, SIGUSR2) are forwarded.

    Args:
        error: Makes the error from a message and the signal.
        quiet: Do not print that the launcher waits.
    """

    def __init__(self, error: Callable[[str, signal.Signals], Exception], *, quiet: bool = False) -> None:
        self._error = error
        self._quiet = quiet
        self.first: signal.Signals | None = None
        self._again_from = 0.0
        self._workers: list[int] = []
        # By nohup, or a shell that runs this in the background.
        self._ignored = {
            number for number in _numbers(_STOP_SIGNALS) if signal.getsignal(number) == signal.SIG_IGN
        }

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that asks to end: end the workers.

        Raises:
            Exception: The result of `error`, at the first signal.
        """
        del frame
        if number in self._ignored:
            return
        if self.first is not None:
            # A terminal that is closed signals all its processes, and so does its shell.
            if number == signal.SIGINT and time.monotonic() > self._again_from:
                kill(self._workers, getattr(signal, "SIGKILL", signal.SIGTERM))
            return
        self.first, self._again_from = signal.Signals(number), time.monotonic() + _SAME
        self._workers = children()
        if self._workers and not self._quiet:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, AGAIN.encode())
        raise self._error(f"got {self.first.name}", self.first)

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Handle a user signal: send it to the workers."""
        del frame
        for worker in children():
            with contextlib.suppress(OSError):
                os.kill(worker, number)

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Install the handlers for the block; after it, kill descendants of workers that a signal ended."""
        handlers = {
            **dict.fromkeys(_numbers(_STOP_SIGNALS), self.end),
            **dict.fromkeys(_numbers(_FORWARDED_SIGNALS), self.forward),
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            end_descendants(self._workers)
            for number, handler in before.items():
                signal.signal(number, handler)


def _numbers(names: Iterable[str]) -> list[signal.Signals]:
    """The signals of these names that this system knows."""
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]


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
