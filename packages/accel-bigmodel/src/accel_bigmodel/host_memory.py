"""Host memory: how much a rank may take, and the return of what it has freed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from accel_state import runtime
from accel_state.libc import libc

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def available_host_memory() -> int:
    """Return the bytes of host memory that this rank may take.

    Schedulers and containers limit memory by control groups, which the system's own count of free memory does
    not know: see https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files.

    Example:
        >>> available_host_memory() <= psutil.virtual_memory().total
        True
    """
    free = psutil.virtual_memory().available
    headroom = cgroup_headroom()
    ranks = runtime.current_topology().local_world_size
    return (free if headroom is None else min(free, headroom)) // ranks


def trim_heap() -> None:
    """Return freed memory to the system, as far as the C library can.

    glibc keeps it when large and small blocks were freed alternately.
    """
    trim = getattr(libc(), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)


def cgroup_headroom(proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """Return the bytes that the memory limits of this process's control groups leave; `None` without a limit.

    Pages of files that the kernel can drop at once count as free.
    """
    if not proc.is_file():
        return None
    rooms: list[int] = []
    for line in proc.read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            rooms.extend(_headrooms(mount, path, names))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            rooms.extend(_headrooms(mount / "memory", path, names))
    return min(rooms, default=None)


def _headrooms(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[int]:
    """Go up from a group to the root: every group above it has a limit of its own."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        limit, usage = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and usage is not None:
            yield max(0, limit - usage + _reclaimable(folder / "memory.stat", names[2]))


def _number(file: Path) -> int | None:
    """Read a number; `None` for an absent file, and for the word `max`."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _reclaimable(file: Path, row: str) -> int:
    lines = _text(file).splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{row} ")), 0)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
