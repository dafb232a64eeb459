"""Return freed memory to the system; glibc keeps it when large and small blocks were freed alternately."""

from __future__ import annotations

import ctypes
import functools
import sys


def trim_heap() -> None:
    """Return free pages of the heap; nothing happens where the C library has no way."""
    trim = _trimmer()
    if trim is not None:
        trim(0)


@functools.cache
def _trimmer() -> ctypes._NamedFuncPointer | None:  # pyright: ignore[reportPrivateUsage] - its only name
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
