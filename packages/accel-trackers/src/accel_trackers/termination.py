"""A last action before SIGTERM ends the process, and a lock that the signal waits for."""

from __future__ import annotations

import os
import signal
import threading
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class TerminationHook:
    """Call a function when SIGTERM arrives, then do what would have been done without.

    Also a re-entrant lock: a signal that arrives while the main thread holds it is acted on when it is
    released.

    Args:
        action: Called in the main thread, between two instructions of whatever runs there.

    Example:
        >>> hook = TerminationHook(lambda: print("terminated"))
        >>> with hook:
        ...     pass
    """

    # A class, since a generator's context manager costs more than a microsecond for each call of log.
    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._before: Any = None
        self._installed = False
        self._lock = threading.RLock()
        self._depth = 0
        self._holder: int | None = None
        self._is_pending = False

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        self._holder = get_ident()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._depth -= 1
        if self._depth:
            self._lock.release()
            return
        self._holder = None  # from here on a signal is acted on at once
        acts, self._is_pending = self._is_pending, False
        self._lock.release()
        if acts:
            self._act()

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

    def _handle(self, number: int, frame: Any) -> None:
        del number, frame
        if self._holder == get_ident():
            self._is_pending = True
        else:
            self._act()

    def _act(self) -> None:
        self._action()
        if callable(self._before):
            self._before(signal.SIGTERM, None)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
