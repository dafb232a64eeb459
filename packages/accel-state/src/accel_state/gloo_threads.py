"""Let gloo's threads finish before the interpreter ends.

A collective is done as soon as its result is there; the thread of gloo that has carried it out drops it a
moment later, and with it the last reference to its tensors. If they have a Python object, it needs the
interpreter's lock for that. While the interpreter ends, CPython before 3.14 ends a thread that asks for the
lock; its stack cannot be unwound through C++, and the process, whose work is done, aborts with "terminate
called without an active exception".
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # in newer versions of torch; 2.9 and older give no name
_PAUSE = 0.001
_CALM = 3  # looks in a row that find all asleep: one may have waited for the lock that a look held
_LIMIT = (
    5.0  # seconds; a thread that waits for another rank sleeps, so this is for a machine without any time
)


def wait_for_gloo_threads(*, or_unnamed: bool = False) -> None:
    """Wait until no thread of gloo runs.

    Args:
        or_unnamed: If none has the name, wait for all threads that Python has not started.
    """
    threads = _threads(or_unnamed=or_unnamed)
    if not threads:
        return
    calm, deadline = 0, time.monotonic() + _LIMIT
    while calm < _CALM and time.monotonic() < deadline:
        time.sleep(_PAUSE)  # which hands over the lock
        calm = 0 if any(map(_runs, threads)) else calm + 1


def _threads(*, or_unnamed: bool) -> list[Path]:
    """The folders of gloo's threads in `/proc`, which only Linux has."""
    threads = list(Path("/proc/self/task").glob("*"))
    named = [path for path in threads if _read(path / "comm").strip() == _NAME]
    if named or not or_unnamed:
        return named
    known = {str(thread.native_id) for thread in threading.enumerate()}
    return [path for path in threads if path.name not in known]


def _runs(thread: Path) -> bool:
    """Whether a thread runs or would run if there were a core for it, rather than wait for something."""
    return _read(thread / "stat").rpartition(")")[2].split()[:1] == ["R"]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""
