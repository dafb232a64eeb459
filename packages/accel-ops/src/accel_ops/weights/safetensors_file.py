"""A safetensors file, mapped: its header is read once, its tensors are views of the mapping.

The format: https://github.com/huggingface/safetensors#format. A header that does not describe the file is
refused, with the tensor it breaks.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import mmap
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from torch import Tensor

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
if hasattr(torch, "float8_e8m0fnu"):  # torch >= 2.7
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu

HEADER_LIMIT = 100_000_000
"""Bytes; the format's own bound."""

_PIECE = 16 << 20
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
# mmap.MADV_POPULATE_READ is not named before Python 3.14; Linux 5.14 and later know it.
_POPULATE_READ = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies in its file: bytes `begin` to `end` from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self.end - self.begin


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
        CheckpointError: The header is damaged, or a tensor lies outside the file.
        FileNotFoundError: There is no such file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.size = self.path.stat().st_size
        header, start = _read_header(self.path, self.size)
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self.entries = {name: _entry(self.path, name, row, start, self.size) for name, row in header.items()}
        self._map: mmap.mmap | None = None

    def tensor(self, name: str) -> Tensor:
        """Map one tensor: no bytes are read until they are used.

        Args:
            name: A name among `entries`.
        """
        entry = self.entries[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype)
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._mapping(), dtype=entry.dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own, in large pieces.

        Args:
            name: A name among `entries`.

        Raises:
            CheckpointError: The file ends inside it.
        """
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        if entry.nbytes:
            self.read_into(tensor.view(-1).view(torch.uint8), entry.begin)
        return tensor

    def read_into(self, target: Tensor, begin: int) -> None:
        """Fill a flat tensor of bytes with the file's bytes from `begin` on.

        Args:
            target: uint8, contiguous, on the CPU.
            begin: Where to start in the file.

        Raises:
            CheckpointError: The file ends before the tensor is full.
        """
        count = target.numel()
        view = memoryview((ctypes.c_char * count).from_address(target.data_ptr())).cast("B")
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin)
            done = 0
            while done < count:
                got = file.readinto(view[done : done + _PIECE])
                if not got:
                    raise CheckpointError(f"{str(self.path)!r} ends at byte {begin + done}; fetch it again")
                done += got

    def read_ahead(self, names: Iterable[str]) -> None:
        """Bring tensors into memory now, and return when they are there (or, on older kernels, asked for)."""
        for begin, end in self._pages(names):
            if not self._populate(begin, end - begin):
                self._advise(getattr(mmap, "MADV_WILLNEED", None), begin, end)

    def forget(self, names: Iterable[str]) -> None:
        """Give the memory of tensors back; they are read again when used. Writes to them are lost."""
        for begin, end in self._pages(names):
            self._advise(getattr(mmap, "MADV_DONTNEED", None), begin, end)

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            self._map = _map_private(self.path, self.size)
        return self._map

    def _populate(self, begin: int, length: int) -> bool:
        """Fault pages in. Through ctypes: it lets other threads run meanwhile, the mmap module does not."""
        libc = _libc()
        if libc is None:
            return False
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping(), begin))
        # mincore() cannot say what is there already: it calls every page of another user's file resident.
        return libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _POPULATE_READ) == 0

    def _advise(self, advice: int | None, begin: int, end: int) -> None:
        if advice is not None and hasattr(self._mapping(), "madvise"):
            with contextlib.suppress(OSError):  # advice that this kernel does not know
                self._mapping().madvise(advice, begin, end - begin)

    def _pages(self, names: Iterable[str]) -> list[tuple[int, int]]:
        runs = _page_runs(self.entries[name] for name in names)
        return [(begin, min(end, self.size)) for begin, end in runs]


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def _map_private(path: Path, size: int) -> mmap.mmap:
    with path.open("rb") as file:
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


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise CheckpointError(
                f"{str(path)!r} is no whole safetensors file: it has {size} bytes, its header claims {length}"
                "; fetch or save it again"
            )
        raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(
            f"{str(path)!r} has a damaged safetensors header ({error}); fetch or save it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{str(path)!r} has a safetensors header that is no table of tensors")
    return header, 8 + length


def _entry(path: Path, name: str, row: Any, start: int, size: int) -> Entry:
    try:
        dtype_name, shape = row["dtype"], tuple(int(length) for length in row["shape"])
        begin, end = (start + int(offset) for offset in row["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r}: the entry of tensor {name!r} is damaged: {row!r}") from error
    if dtype_name not in DTYPES:
        raise CheckpointError(
            f"{str(path)!r}: tensor {name!r} has element type {dtype_name!r}, unknown to this torch"
        )
    dtype = DTYPES[dtype_name]
    if not start <= begin <= end or min(shape, default=0) < 0:
        raise CheckpointError(f"{str(path)!r}: the entry of tensor {name!r} is damaged: {row!r}")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{str(path)!r}: tensor {name!r} of shape {list(shape)} and type {dtype_name} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, its entry spans {end - begin}"
        )
    if end > size:
        raise CheckpointError(
            f"{str(path)!r} is truncated: tensor {name!r} ends at byte {end}, the file has {size}; "
            "fetch or save it again"
        )
    return Entry(dtype=dtype, shape=shape, begin=begin, end=end)
