"""Return freed memory to the system; glibc keeps it when large and small blocks were freed alternately."""

from __future__ import annotations

from accel_state.libc import libc


def trim_heap() -> None:
    """Return free pages of the heap; nothing happens where the C library has no way."""
    trim = getattr(libc(), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
