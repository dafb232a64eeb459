"""A safetensors file, mapped: its header is read once, its tensors are views of the mapping."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import torch

from accel_ops.weights.safetensors_header import Entry, read_header
from accel_state.errors import CheckpointError
from accel_state.libc import libc
from accel_state.regular_file import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import BufferedReader, FileIO

    from torch import Tensor

_READ_SIZE = 16 << 20
_PROBES = 16
_PAGEMAP = Path("/proc/self/pagemap")
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
# mmap.MADV_POPULATE_READ is not named before Python 3.14; Linux 5.14 and later know it.
_POPULATE_READ = 22


class SafetensorsFile:
    """A safetensors file whose tensors are read in place.

    Tensors are private, copy-on-write views: writing to one never changes the file. They stay valid after the
    object is gone, as long as nobody truncates the file; a file that is *replaced* (`os.replace`, as accel's
    own writers do) leaves them whole.

    Args:
        path: The file.

    Attributes:
        path: The same, as a `Path`.
        entries: Tensor name to where it lies.
        metadata: The header's `__metadata__`.

    Raises:
        CheckpointError: The file is no safetensors file, by the rules of the safetensors library.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open_regular(self.path) as file:
            self._identity = _identity_of(file)
            self.size = self._identity[-1]
            self.entries, self.metadata = read_header(file, self.path, self.size)
        self._map: mmap.mmap | None = None

    def tensor(self, name: str) -> Tensor:
        """Map one tensor: no bytes are read until they are used."""
        entry = self.entries[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._mapping(), dtype=entry.dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own, in large pieces."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.nbytes:
            self.read_into(tensor.view(-1).view(torch.uint8), entry.begin)
        return tensor

    def read_into(self, target: Tensor, begin: int) -> None:
        """Fill a flat tensor of bytes with the file's bytes from `begin` on."""
        with self._open() as file:
            fill_from(file, target, begin, self.path)

    def read_ahead(self, names: Iterable[str]) -> None:
        """Bring tensors into memory now, and return when they are there (or, on older kernels, asked for)."""
        for begin, end in self._pages(names):
            if not self._populate(begin, end - begin):
                self._advise(getattr(mmap, "MADV_WILLNEED", None), begin, end)

    def contents(self) -> memoryview:
        """Return the bytes of the file, mapped as its tensors are."""
        return memoryview(self._mapping()).toreadonly()

    def evict(self, names: Iterable[str]) -> None:
        """Release the memory of tensors; they are read again when used. Writes to them are lost."""
        for begin, end in self._pages(names):
            self._advise(getattr(mmap, "MADV_DONTNEED", None), begin, end)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            with self._open() as file:
                self._map = _map_private(file, self.size)
        return self._map

    def _open(self) -> BufferedReader:
        """Open the file whose header was read, and no other that has its name by now."""
        file = open_regular(self.path)
        if _identity_of(file) == self._identity:
            return file
        file.close()
        raise CheckpointError(f"{str(self.path)!r} was replaced or resized while it was read; load it again")

    def _populate(self, begin: int, length: int) -> bool:
        """Fault pages in. Through ctypes: it lets other threads run meanwhile, the mmap module does not."""
        library = libc()
        if library is None:
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping(), begin))
        if _is_present(address, length):
            return True
        return library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _POPULATE_READ) == 0

    def _advise(self, advice: int | None, begin: int, end: int) -> None:
        if advice is not None and hasattr(self._mapping(), "madvise"):
            with contextlib.suppress(OSError):  # advice that this kernel does not know
                self._mapping().madvise(advice, begin, end - begin)

    def _pages(self, names: Iterable[str]) -> list[tuple[int, int]]:
        runs = _page_runs(self.entries[name] for name in names)
        return [(begin, min(end, self.size)) for begin, end in runs]


def fill_from(file: BufferedReader | FileIO, target: Tensor, begin: int, path: Path) -> None:
    """Fill a flat uint8 tensor on the CPU with the bytes of an open file from `begin` on.

    Raises:
        CheckpointError: The file ends before the tensor is full.
    """
    count, done = target.numel(), 0
    view = memoryview((ctypes.c_char * count).from_address(target.data_ptr())).cast("B")
    file.seek(begin)
    while done < count:
        got = file.readinto(view[done : done + _READ_SIZE])
        if not got:
            raise CheckpointError(f"{str(path)!r} ends at byte {begin + done}; fetch it again")
        done += got


def _is_present(address: int, length: int) -> bool:
    """Look at a few pages of this process's own page table: walking all of them costs as much as computing.

    mincore() cannot be used: it reports every page of another user's file as resident. Bit 63 of an entry of
    pagemap is readable by all users: https://docs.kernel.org/admin-guide/mm/pagemap.html.
    """
    first, last = address // mmap.PAGESIZE, (address + length - 1) // mmap.PAGESIZE
    try:
        with _PAGEMAP.open("rb", buffering=0) as table:
            for number in {first + (last - first) * part // _PROBES for part in range(_PROBES + 1)}:
                table.seek(8 * number)
                if not int.from_bytes(table.read(8), sys.byteorder) >> 63:
                    return False
    except OSError:
        return False
    return True


def _identity_of(file: BinaryIO) -> tuple[int, int, int]:
    facts = os.fstat(file.fileno())
    return facts.st_dev, facts.st_ino, facts.st_size


def _map_private(file: BinaryIO, size: int) -> mmap.mmap:
    if sys.platform == "linux":
        # Without a reservation, or the kernel refuses a private mapping larger than its memory.
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        return mmap.mmap(file.fileno(), size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def _page_runs(entries: Iterable[Entry]) -> list[tuple[int, int]]:
    """Merge byte ranges into whole pages, neighbours joined, so that advice takes one call per run."""
    page = mmap.PAGESIZE
    runs: list[tuple[int, int]] = []
    for entry in sorted(entries, key=lambda entry: entry.begin):
        begin, end = entry.begin // page * page, -(-entry.end // page) * page
        if runs and begin <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
        elif entry.nbytes:
            runs.append((begin, end))
    return runs
