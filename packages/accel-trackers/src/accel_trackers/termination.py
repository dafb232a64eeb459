"""A last action before SIGTERM ends the process, and a lock that the signal waits for."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class TerminationHook:
    """Call a function when SIGTERM arrives, then do what would have been done without.

    Also a re-entrant lock: a signal that arrives while the main thread holds it is acted on when it is
    released.

    Example:
        >>> hook = TerminationHook(lambda: print("terminated"))
        >>> with hook:
        ...     pass
    """

    # A class, since a generator's context manager costs more than a microsecond. A session's `log` uses
    # `lock` and `is_pending` themselves: the two methods of a block cost as much as the rest of it.
    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._before: Any = None
        self._installed = False
        self.lock = threading.RLock()
        self._owner = threading.Condition(self.lock)
        self.is_pending = False

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.lock.release()
        if self.is_pending:
            self.act_when_free()

    def act_when_free(self) -> None:
        """Act on a signal that has waited, in the main thread, unless that is still within an outer block."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self.is_pending and not self._is_owned():
            self.is_pending = False
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
        if self._is_owned():
            self.is_pending = True
        else:
            self._act()

    def _is_owned(self) -> bool:
        """Whether this thread holds the lock: only then may a condition of it be notified."""
        try:
            self._owner.notify(0)
        except RuntimeError:
            return False
        return True

    def _act(self) -> None:
        self._action()
        if callable(self._before):
            self._before(signal.SIGTERM, None)
        elif self._before != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
