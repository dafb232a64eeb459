"""End this process when its parent dies, so that ranks do not outlive a launcher that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_PAUSE = 1.0  # seconds between two looks at the parent


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, for whatever reason.

    It is SIGKILL: the parent keeps the store of the job, without which nothing can be finished together, and
    a process that waits for other ranks in C++ would not get to the handler of another signal. On Linux the
    kernel sends it, also after this process has become another program; elsewhere a thread looks at the
    parent once a second. Windows is left out.

    Args:
        parent: Who has started this process; if that has ended already, this one ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    elif sys.platform != "win32":
        threading.Thread(target=_watch, args=(os.getppid(),), name="accel-parent", daemon=True).start()
    if sys.platform != "win32" and not _is_alive(parent):  # it died before anybody could notice
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, and alive
        pass
    return True
