"""A last action before SIGTERM ends the process."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class TerminationHook:
    """Call a function when SIGTERM arrives, then do what would have been done without.

    Args:
        action: Called in the main thread, between two instructions of whatever runs there. Returns whether
            the signal may take its course now; otherwise `resume` must be called later.
    """

    def __init__(self, action: Callable[[], bool]) -> None:
        self._action = action
        self._before: Any = None
        self._installed = False

    def install(self) -> None:
        """Begin to listen; nothing happens outside of the main thread, where Python does not allow it."""
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def remove(self) -> None:
        """Stop listening; a handler that was installed later stays."""
        if self._installed and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        self._installed = False

    def resume(self) -> None:
        """Let the signal take the course that it had without this hook."""
        if callable(self._before):
            self._before(signal.SIGTERM, None)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: Any) -> None:
        del number, frame
        if self._action():
            self.resume()
