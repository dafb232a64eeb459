"""Handle SIGINT and SIGHUP again where `nohup` or a shell ignores them, for tests of signals."""

from __future__ import annotations

import signal


def handle_signals() -> None:
    """Let what is started from here heed interrupts and hang-ups, even if this process ignores them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)  # a handler, unlike ignorance, is not inherited
