"""The C library of Linux, for system calls that Python does not offer."""

from __future__ import annotations

import ctypes
import functools
import sys


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return the C library; `None` on other systems than Linux.

    Example:
        >>> import os
        >>> library = libc()
        >>> library is None or library.getpid() == os.getpid()
        True
    """
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
