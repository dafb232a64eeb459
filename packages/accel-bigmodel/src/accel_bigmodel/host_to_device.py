"""Copy tensors to a device through pinned staging buffers; measure available host memory.

Files are read with large plain reads, not through mmap: a copy from a mapping is several times slower
(https://github.com/huggingface/safetensors/pull/729).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from torch import Tensor

from accel_bigmodel.offload import StoredTensor
from accel_state import runtime
from accel_state.streams import DeviceStreams, pinned_if_possible

if TYPE_CHECKING:
    from accel_ops.weights.safetensors_io import SafetensorsFile


SLOT_BYTES = 16 << 20
SLOTS = 8
"""Large enough for full bandwidth of disk and device, small enough that pinning them is quick.

Eight threads read cached pages into pinned memory and copy them to an H100 at 22 GB/s, one thread at 4.
"""


class HostToDevice:
    """Copies stored tensors to a device on one copy stream.

    Each of the `slots` staging buffers, of `slot_bytes`, has a reader thread. If host memory cannot be pinned
    there are fewer buffers, or one that is not pinned.
    """

    def __init__(self, streams: DeviceStreams, *, slot_bytes: int = SLOT_BYTES, slots: int = SLOTS) -> None:
        self.streams = streams
        self.stream = streams.new_stream()
        self._slot_bytes = slot_bytes
        self._count = slots
        self._ring: list[_Slot] = []
        self._readers = ThreadPoolExecutor(
            max_workers=slots, thread_name_prefix="accel-read", initializer=streams.set_current
        )

    def copy(self, tensors: Sequence[tuple[StoredTensor, Tensor]]) -> None:
        """Issue copies of stored tensors to flat device tensors in the dtypes in which they are used.

        They are cast on the host: the device may have room for the cast ones only. Returns when all copies
        are issued; they complete on the copy stream. Not thread-safe.

        Raises:
            CheckpointError: A file ends too early. No copies are issued after the error.
        """
        parts = [
            (stored, start, target[start : start + step])
            for stored, target in tensors
            for step in [self._slot_bytes // target.itemsize]
            for start in range(0, target.numel(), step)
        ]
        ring = self._slots(len(parts))
        readers = [
            self._readers.submit(self._stage, slot, parts[index :: len(ring)])
            for index, slot in enumerate(ring)
        ]
        wait(readers)  # even if one fails: the caller reuses the memory to which the others copy
        for reader in readers:
            reader.result()

    def copy_pinned(self, source: Tensor, target: Tensor) -> None:
        """Issue the copy of a pinned tensor."""
        with self.streams.on(self.stream):
            self.streams.copy_(target, source)

    def _slots(self, count: int) -> list[_Slot]:
        """Return at most as many slots as there are parts to copy."""
        while len(self._ring) < min(count, self._count):
            pinned = pinned_if_possible(self.streams, self._slot_bytes)
            if pinned is None:
                self._count = max(1, len(self._ring))
                if self._ring:
                    break
            buffer = (
                torch.empty(self._slot_bytes, dtype=torch.uint8, device="cpu") if pinned is None else pinned
            )
            self._ring.append(_Slot(buffer, pinned is not None, self.streams.new_event()))
        return self._ring[:count]

    def _stage(self, slot: _Slot, parts: Sequence[tuple[StoredTensor, int, Tensor]]) -> None:
        copy = self.streams.copy_ if slot.is_pinned else self.streams.copy_pageable_
        for stored, start, target in parts:
            host = slot.buffer[: target.nbytes].view(target.dtype)
            slot.copied.synchronize()
            stored.read_into(host, start)
            with self.streams.on(self.stream):
                copy(target, host)
            slot.copied.record(self.stream)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A staging buffer, and the event of the last copy from it."""

    buffer: Tensor
    is_pinned: bool
    copied: torch.Event


def upload(
    file: SafetensorsFile, dtypes: Mapping[str, torch.dtype], pipeline: HostToDevice
) -> dict[str, Tensor]:
    """Copy tensors of a file to a device, in the dtypes that `dtypes` maps their names to.

    The current stream may use them without synchronisation.
    """
    streams = pipeline.streams
    tensors: dict[str, Tensor] = {}
    copies: list[tuple[StoredTensor, Tensor]] = []
    for name in sorted(dtypes, key=lambda name: file.entries[name].begin):
        entry, dtype = file.entries[name], dtypes[name]
        nbytes = math.prod(entry.shape) * dtype.itemsize
        flat = streams.empty(max(nbytes, dtype.itemsize))[:nbytes]
        tensors[name] = flat.view(dtype).view(entry.shape)
        if nbytes:
            stored = StoredTensor(memory=file.tensor(name), dtype=dtype, file=file, name=name)
            copies.append((stored, flat.view(dtype)))
    # The memory belongs to the current stream, whose earlier work may still use it.
    pipeline.stream.wait_stream(streams.current_stream())
    try:
        pipeline.copy(copies)
    finally:
        # Even after an error: the memory returns to the current stream's pool while copies run.
        streams.current_stream().wait_stream(pipeline.stream)
    return tensors


_PROC = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def available_host_memory() -> int:
    """Return the bytes of host memory that this rank may allocate.

    Schedulers and containers limit memory by control groups, which the system's free memory does not
    reflect: see https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files.

    Example:
        >>> available_host_memory() <= psutil.virtual_memory().total
        True
    """
    free = psutil.virtual_memory().available
    headroom = cgroup_headroom()
    ranks = runtime.current_topology().local_world_size
    return (free if headroom is None else min(free, headroom)) // ranks


def cgroup_headroom(proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """Return the bytes left within the limits of this process's control groups; `None` without a limit.

    Page cache that the kernel can drop at once counts as free.
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
    """Yield the headroom of a group and of every group above it, each of which may have a limit."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        limit, usage = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and usage is not None:
            rows = (line.split() for line in _text(folder / "memory.stat").splitlines())
            yield max(0, limit - usage + next((int(row[1]) for row in rows if row[0] == names[2]), 0))


def _number(file: Path) -> int | None:
    """Read a number from a file; `None` if the file is absent, or contains `max`."""
    text = _text(file).strip()
    return int(text) if text.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""
