"""The header of a safetensors file. Nothing passes that the safetensors library refuses.

The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from accel_state.errors import CheckpointError
from accel_state.regular_file import JSON_LIMIT, parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

HEADER_LIMIT = JSON_LIMIT
"""Bytes; the format's own bound."""

_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_INT64_MAX = 2**63 - 1
_MAX_DIMS = 64  # more than that no operation of torch takes


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


def read_header(file: BinaryIO, path: Path, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read the header of a file.

    Returns:
        Tensor name to where it lies, in the header's order; and the header's `__metadata__`.

    Raises:
        CheckpointError: The header is not of the format, or does not describe the whole file.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, HEADER_LIMIT):
        raise CheckpointError(
            f"{str(path)!r} is no whole safetensors file: it has {size} bytes, its header claims {length}"
            "; fetch or save it again"
        )
    raw = file.read(length)
    header = parse_json(
        raw,
        path,
        what="safetensors file, its header is damaged",
        object_pairs_hook=_without_repetition,
        parse_constant=_refuse_number,
        parse_int=_number,
    )
    if not isinstance(header, dict) or not raw.startswith(b"{"):
        raise CheckpointError(f"{str(path)!r} has a safetensors header that is no table of tensors")
    metadata = _metadata(path, header.pop(_METADATA, None))
    start = 8 + length
    entries = {name: _entry(path, name, row, start, size) for name, row in header.items()}
    _check_coverage(path, entries, start, size)
    return entries, metadata


def make_header(
    rows: Iterable[tuple[str, tuple[int, ...], torch.dtype]], alignment: int
) -> tuple[bytes, list[tuple[int, int]]]:
    """Make the header of a file that holds tensors one after the other.

    Args:
        rows: Name, shape and dtype of each, in the order of the file.
        alignment: What the bytes before the first tensor are a multiple of.

    Returns:
        The bytes before the tensors; and where each tensor begins and ends, from the start of the file.

    Raises:
        CheckpointError: The format has no such element type.
    """
    # The metadata is what transformers and others look for.
    table: dict[str, Any] = {_METADATA: {"format": "pt"}}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, shape, dtype in rows:
        if dtype not in DTYPE_NAMES:
            raise CheckpointError(f"safetensors have no element type for {name!r}, which is {dtype}.")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        spans.append((begin, end))
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % alignment)
    start = 8 + len(header)
    return len(header).to_bytes(8, "little") + header, [(start + begin, start + end) for begin, end in spans]


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"{twice!r} is there twice")
    for key in table:
        key.encode()  # a lone surrogate is no text
    return table


def _refuse_number(text: str) -> None:
    raise ValueError(f"{text} is no number here")


def _number(text: str) -> int:
    return -1 if text.startswith("-") else int(text)  # nothing is negative here, zero neither


def _metadata(path: Path, table: Any) -> dict[str, str]:
    if table is None:
        return {}
    if not isinstance(table, dict) or not all(isinstance(value, str) for value in table.values()):
        raise CheckpointError(f"{str(path)!r}: the metadata of its safetensors header is no table of texts")
    return table


def _entry(path: Path, name: str, row: Any, start: int, size: int) -> Entry:
    if not _is_row(row):
        raise CheckpointError(
            f"{str(path)!r}: the entry of tensor {name!r} is damaged: {str(row)[:200]!r}; "
            "fetch or save it again"
        )
    shape, dtype = tuple[int, ...](row["shape"]), DTYPES.get(row["dtype"])
    begin, end = (start + offset for offset in row["data_offsets"])
    if dtype is None:
        raise CheckpointError(
            f"{str(path)!r}: tensor {name!r} has element type {row['dtype']!r}, unknown to this torch"
        )
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{str(path)!r}: tensor {name!r} of shape {list(shape)} and type {row['dtype']} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, its entry spans {end - begin}"
        )
    if end > size:
        raise CheckpointError(
            f"{str(path)!r} is truncated: tensor {name!r} ends at byte {end}, the file has {size}; "
            "fetch or save it again"
        )
    return Entry(dtype=dtype, shape=shape, begin=begin, end=end)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or row.keys() != _FIELDS or not isinstance(row["dtype"], str):
        return False
    shape, offsets = row["shape"], row["data_offsets"]
    return (
        _are_numbers(shape)
        and len(shape) <= _MAX_DIMS
        and _are_numbers(offsets)
        and len(offsets) == 2
        and offsets[0] <= offsets[1]
        # An empty tensor may have any other length, as far as torch can count.
        and math.prod(max(length, 1) for length in shape) * 16 <= _INT64_MAX
    )


def _are_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_coverage(path: Path, entries: dict[str, Entry], start: int, size: int) -> None:
    """Refuse overlaps and holes: tensors follow each other from the header to the end of the file."""
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise CheckpointError(
                f"{str(path)!r}: tensor {name!r} begins at byte {entry.begin}, the one before it ends at "
                f"{end}; fetch or save it again"
            )
        end = entry.end
    if end != size:
        raise CheckpointError(
            f"{str(path)!r} has {size} bytes, its tensors end at {end}; fetch or save it again"
        )
