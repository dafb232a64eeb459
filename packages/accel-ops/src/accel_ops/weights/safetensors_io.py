"""Map and write safetensors files: `SafetensorsFile`, `write_safetensors`, `create_safetensors`.

The format: https://github.com/huggingface/safetensors#format. Headers are read and tensors mapped here: the
safetensors library returns no offsets, reads no object stores, and maps without `MAP_NORESERVE`, so that
Linux rejects a file larger than the host's memory.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import mmap
import operator
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops.weights.tensors import is_dense, tensor_memory
from accel_state.errors import CheckpointError, first_line, some_of
from accel_state.frozen import frozen
from accel_state.platforms import can_replace_mapped, map_private
from accel_state.remote import AnyPath, RemoteFile, RemotePath

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_log = logging.getLogger(__name__)

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_HEADER_LIMIT = 100_000_000  # bytes, of the format


class SafetensorsFile:
    """A safetensors file whose tensors are read in place.

    Tensors are private, copy-on-write views: writing to one never changes the file. They stay valid after the
    object is deleted, unless the file is truncated. The file stays open: if it is replaced (`os.replace`, as
    by accel's writers), the old one is read, except on Windows, where an open file could not be replaced.
    Tensors of a file on an object store are copies in memory.

    Args:
        path: The file.

    Attributes:
        path: The file, as a path object.
        entries: Tensor name to its byte range in the file.
        metadata: The header's `__metadata__`.

    Raises:
        CheckpointError: The file is not a safetensors file, or is damaged.
        FileNotFoundError: The file does not exist.
    """

    def __init__(self, path: str | os.PathLike[str] | RemotePath) -> None:
        self.path = path if isinstance(path, RemotePath) else Path(path)
        self._map: mmap.mmap | None = None
        if isinstance(self.path, RemotePath):
            self._version = self.path.version()
            self._remote = RemoteFile(self.path)
            self.size = self._remote.size
            self.entries, self.metadata = _read_header(self._remote, self.size, self.path)
            return
        with self.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            self.entries, self.metadata = _read_header(file, self.size, self.path)
            self._descriptor = None
            if can_replace_mapped():
                self._descriptor = os.dup(file.fileno())
                weakref.finalize(self, os.close, self._descriptor)

    def tensor(self, name: str) -> Tensor:
        """Map one tensor: no bytes are read until they are used."""
        entry = self.entries[name]
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        if isinstance(self.path, RemotePath):
            return self.read(name)
        count = math.prod(entry.shape)
        flat = torch.frombuffer(self._mapping(), dtype=entry.dtype, count=count, offset=entry.begin)
        return flat.view(entry.shape)

    def read(self, name: str) -> Tensor:
        """Read one tensor into new memory, in large chunks."""
        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        if entry.nbytes:
            self.read_into(tensor.view(-1).view(torch.uint8), entry.begin)
        return tensor

    def read_part(self, name: str, region: Sequence[slice]) -> Tensor:
        """Read a part of one tensor into new memory, and of the file the bytes of this part only.

        Of a file on an object store, whole rows of dim 0 are read: it answers few large requests.

        Args:
            name: The tensor.
            region: For each dim, a slice with a start and a stop.
        """
        entry = self.entries[name]
        shape = [part.stop - part.start for part in region]
        cut = [dim for dim, size in enumerate(shape) if size != entry.shape[dim]]
        if not cut:
            return self.read(name)
        if isinstance(self.path, RemotePath) and cut[-1]:
            full = [slice(0, size) for size in entry.shape[1:]]
            return self.read_part(name, [region[0], *full])[:, *region[1:]].clone()
        tensor = torch.empty(shape, dtype=entry.dtype, device="cpu")
        if not tensor.numel():
            return tensor
        # 1. Dims after the last one that is cut are whole: a run of bytes for each index of those before it.
        last = cut[-1]
        strides = [math.prod(entry.shape[dim + 1 :]) * entry.dtype.itemsize for dim in range(len(shape))]
        runs = tensor.view(-1).view(torch.uint8).view(-1, shape[last] * strides[last])
        first = entry.begin + region[last].start * strides[last]
        # 2. Read the runs.
        places = itertools.product(*(range(part.start, part.stop) for part in region[:last]))
        for run, place in zip(runs, places, strict=True):
            self.read_into(run, first + sum(map(operator.mul, place, strides)))
        return tensor

    def read_into(self, target: Tensor, begin: int) -> None:
        """Fill a flat tensor of bytes with the file's bytes from `begin` on."""
        if isinstance(self.path, RemotePath):
            self._remote.read_at(as_bytes(target), begin)
            return
        if self._descriptor is not None:
            fill_from(self._descriptor, target, begin, self.path)
            return
        with self.path.open("rb") as file:
            fill_from(file, target, begin, self.path)

    def check_unchanged(self) -> None:
        """Check that a file on an object store was not replaced since its header was read.

        Raises:
            CheckpointError: The file was replaced.
        """
        if isinstance(self.path, RemotePath) and self.path.version() != self._version:
            raise CheckpointError(f"{str(self.path)!r} was replaced while it was read; load it again")

    def read_ahead(self, names: Iterable[str]) -> None:
        """Read tensors into the page cache, by an access to each page; return when they are read."""
        for name in names:
            self.tensor(name).view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()

    def _mapping(self) -> mmap.mmap:
        if self._map is None and self._descriptor is not None:
            self._map = map_private(self._descriptor, self.size)
        elif self._map is None:
            with self.path.open("rb") as file:
                self._map = map_private(file.fileno(), self.size)
        return self._map


@frozen
class HeaderEntry:
    """The byte range of one tensor, from `begin` to `end` of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes of the tensor."""
        return self.end - self.begin


def _read_header(
    file: BufferedReader | RemoteFile, size: int, path: AnyPath
) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Read the byte range of each tensor, in the header's order, and the header's `__metadata__`.

    Raises:
        CheckpointError: The tensors do not cover the file, without gaps or overlaps.
    """
    entries: dict[str, HeaderEntry] = {}
    places: list[tuple[int, int, str]] = []
    try:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _HEADER_LIMIT):
            raise ValueError(f"its header would have {length} bytes")
        header, start = json.loads(file.read(length)), 8 + length
        metadata = header.pop(_METADATA, None) or {}
        for name, row in header.items():
            if row["dtype"] not in DTYPES:
                raise ValueError(
                    f"the tensor {name!r} has the element type {row['dtype']!r}, which is unknown"
                )
            dtype, shape = DTYPES[row["dtype"]], tuple(map(operator.index, row["shape"]))
            begin, end = map(operator.index, row["data_offsets"])
            if row["dtype"] == "F4":  # elements are counted there, and bytes of two elements here
                shape = (*shape[:-1], shape[-1] // 2)
            entries[name] = HeaderEntry(dtype=dtype, shape=shape, begin=start + begin, end=start + end)
            places.append((start + begin, start + end, name))
        end = start
        for begin, stop, name in sorted(places):
            entry = entries[name]
            nbytes = math.prod(entry.shape) * entry.dtype.itemsize
            if begin != end or stop - begin != nbytes or min(entry.shape, default=0) < 0:
                raise ValueError(f"the tensor {name!r} is not where its header says")
            end = stop
        if end != size:
            raise ValueError(f"its header describes {end} bytes")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{str(path)!r}, of {size} bytes, is not a safetensors file, or is truncated or damaged: "
            f"{some_of([first_line(error)], width=300)}; fetch or save it again"
        ) from error
    return entries, metadata


_READ_SIZE = 16 << 20


def fill_from(file: BufferedReader | FileIO | int, target: Tensor, begin: int, path: AnyPath) -> None:
    """Fill a flat uint8 tensor on the CPU with the bytes of a file from `begin` on.

    The file is open, or a descriptor, from which several threads may read at once.

    Raises:
        CheckpointError: The file ends before the tensor is full.
    """
    done = 0
    view = as_bytes(target)
    while done < len(view):
        part = view[done : done + _READ_SIZE]
        if isinstance(file, int):
            got = os.preadv(file, [part], begin + done)
        else:
            file.seek(begin + done)
            got = file.readinto(part)
        if not got:
            raise CheckpointError(f"{str(path)!r} ends at byte {begin + done}; fetch it again")
        done += got


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Remove tied tensors and make every tensor contiguous.

    A tensor with two names is kept under the first; loading ties it again. Different slices of one storage
    (the halves of a fused weight) are all kept, each as a copy.

    Args:
        state_dict: Name to tensor; values that are not tensors stay unchanged.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, 2)
        >>> list(clean_state_dict_for_safetensors({"a": weight, "b": weight}))
        ['a']
    """
    cleaned: dict[str, Any] = {}
    first: dict[object, str] = {}
    dropped: list[str] = []
    storages: set[object] = set()
    for name, value in state_dict.items():
        if not is_dense(value) or value.is_meta:
            cleaned[name] = value
            continue
        memory = tensor_memory(value)
        storage, same = memory[0], (memory, value.dtype)
        if value.numel() and same in first:
            dropped.append(f"{name} (kept as {first[same]})")
            continue
        first[same] = name
        apart = value if storage not in storages else value.clone()
        storages.add(storage)
        cleaned[name] = apart.contiguous()
    if dropped:
        # Other programs look for the first words.
        _log.warning(
            "Removed shared tensor %s while saving: weights under a second name are saved once.",
            ", ".join(dropped),
        )
    return cleaned


def write_safetensors(tensors: Mapping[str, Tensor], sink: SupportsWrite[Any]) -> None:
    """Write tensors as one safetensors file.

    Args:
        tensors: Name to tensor, without shared memory; see `clean_state_dict_for_safetensors`.
        sink: Such as a binary file. It gets each tensor in one call; its memory may change afterwards.

    Raises:
        CheckpointError: A value is not a dense tensor, or the format does not support its dtype.
    """
    for name, value in tensors.items():
        _check_writable(name, value)
    header, spans = make_header({name: (tuple(value.shape), value.dtype) for name, value in tensors.items()})
    sink.write(header)
    for name in spans:
        if tensors[name].numel():
            sink.write(as_bytes(tensors[name].detach().cpu()))


def create_safetensors(
    path: Path, rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor]:
    """Create a safetensors file, and return its mapped tensors for the caller to fill.

    The system writes filled pages when it needs their memory; the file is complete once the tensors are
    filled and deleted.

    Raises:
        CheckpointError: The format does not support a dtype.
        OSError: The disk is full.
    """
    header, spans = make_header(rows)
    size = max((end for _, end in spans.values()), default=len(header))
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        # Writing through a mapping to a full disk would kill the process; this raises earlier.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            os.truncate(file.fileno(), size)
    everything = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return {
        name: everything[begin:end].view(rows[name][1]).view(rows[name][0])
        for name, (begin, end) in spans.items()
    }


def make_header(
    rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Create the header of a file of tensors, from their shapes and dtypes.

    Returns:
        The bytes before the tensors; and begin and end of each tensor, in the order of the file.

    Raises:
        CheckpointError: The format does not support a dtype or name.
    """
    # transformers and other libraries require this metadata.
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    spans: dict[str, tuple[int, int]] = {}
    end = 0
    # Large elements first, so that every tensor is aligned to its element size.
    for name, (shape, dtype) in sorted(rows.items(), key=lambda row: -row[1][1].itemsize):
        if name == _METADATA:
            raise CheckpointError(f"safetensors have no room for a tensor of the name {name!r}; rename it.")
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"safetensors have no element type for {name!r}, which is {dtype}; pass "
                "safe_serialization=False."
            )
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        counts = [*shape[:-1], shape[-1] * 2] if DTYPE_NAMES[dtype] == "F4" else [*shape]
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": counts, "data_offsets": [begin, end]}
        spans[name] = begin, end
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    content = len(header).to_bytes(8, "little") + header
    return content, {name: (start + begin, start + end) for name, (begin, end) in spans.items()}


def _check_writable(name: str, value: object) -> None:
    if not is_dense(value) or value.is_quantized or value.is_meta:
        kind = type(value).__name__
        if isinstance(value, Tensor):
            kind = f"tensor on {value.device} ({value.layout}, {value.dtype})"
        raise CheckpointError(
            f"safetensors hold dense tensors with values; {name!r} is a {kind}. Keep it out of the state "
            "dict, or pass safe_serialization=False."
        )


def as_bytes(tensor: Tensor) -> memoryview:
    r"""View the contents of a CPU tensor as bytes, without a copy if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType] - an array is a buffer
