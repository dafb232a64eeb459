"""Let gloo's threads finish before the interpreter ends.

A collective is done as soon as its result is there; the thread of gloo that has carried it out drops it a
moment later, and with it the last reference to its tensors. If they have a Python object, it needs the
interpreter's lock for that. While the interpreter ends, CPython before 3.14 ends a thread that asks for the
lock; its stack cannot be unwound through C++, and the process, whose work is done, aborts with "terminate
called without an active exception".
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # as torch calls them
_PAUSE = 0.001
_CALM = 3  # looks in a row that find all asleep: one may have waited for the lock that a look held
_LIMIT = (
    5.0  # seconds; a thread that waits for another rank sleeps, so this is for a machine without any time
)


def wait_for_gloo_threads() -> None:
    """Wait until no thread of gloo runs."""
    threads = _threads()
    if not threads:
        return
    calm, deadline = 0, time.monotonic() + _LIMIT
    while calm < _CALM and time.monotonic() < deadline:
        time.sleep(_PAUSE)  # which hands over the lock
        calm = 0 if any(map(_runs, threads)) else calm + 1


def _threads() -> list[Path]:
    """The folders of gloo's threads in `/proc`, which only Linux has."""
    return [path for path in Path("/proc/self/task").glob("*") if _read(path / "comm").strip() == _NAME]


def _runs(thread: Path) -> bool:
    """Whether a thread runs or would run if there were a core for it, rather than wait for something."""
    return _read(thread / "stat").rpartition(")")[2].split()[:1] == ["R"]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""
