"""Signals on their way from a launcher to the processes that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING

from accel_cli.launch.orphans import children, end_descendants, kill

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable
    from types import FrameType

_ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
_TOLD = ("SIGUSR1", "SIGUSR2")
_SAME = 0.5  # seconds in which Ctrl-C comes from one press of the keys, by way of several programs
AGAIN = "accel launch: waiting for the processes to end; Ctrl-C ends them at once\n"
"""What is said when a signal asks to end."""


class Relay:
    """Takes the signals that this process gets.

    The first that asks to end becomes an error, upon which torch hands it to the workers and waits. Ctrl-C
    after that kills them. Those that only tell something are passed on.

    Args:
        error: Makes the error from a message and the signal.
        quiet: Do not tell what comes next.
    """

    def __init__(self, error: Callable[[str, signal.Signals], Exception], *, quiet: bool = False) -> None:
        self._error = error
        self._quiet = quiet
        self.first: signal.Signals | None = None
        self._again_from = 0.0
        self._workers: list[int] = []
        # By nohup, or a shell that runs this in the background.
        self._ignored = {number for number in _numbers(_ENDING) if signal.getsignal(number) == signal.SIG_IGN}

    def end(self, number: int, frame: FrameType | None) -> None:
        """End the workers: the handler of what asks for it.

        Raises:
            Exception: The one of `error`, the first time.
        """
        del frame
        if number in self._ignored:
            return
        if self.first is not None:
            # A terminal that is closed tells everybody, and so does the shell in it.
            if number == signal.SIGINT and time.monotonic() > self._again_from:
                kill(self._workers, getattr(signal, "SIGKILL", signal.SIGTERM))
            return
        self.first, self._again_from = signal.Signals(number), time.monotonic() + _SAME
        self._workers = children()
        if self._workers and not self._quiet:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, AGAIN.encode())
        raise self._error(f"got {self.first.name}", self.first)

    def tell(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on: the handler of what asks for no end."""
        del frame
        for worker in children():
            with contextlib.suppress(OSError):
                os.kill(worker, number)

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Take signals inside. Afterwards nothing is left of the workers that a signal has ended."""
        handlers = {**dict.fromkeys(_numbers(_ENDING), self.end), **dict.fromkeys(_numbers(_TOLD), self.tell)}
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
