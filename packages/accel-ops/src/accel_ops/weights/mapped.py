"""A new safetensors file whose tensors are mapped, to be filled in any order without having all in memory."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.weights.safetensors_file import DTYPES
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNMENT = 16


def create_safetensors(
    path: Path, rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor]:
    """Make a safetensors file with room for some tensors.

    The system writes out what is filled in when it needs the memory; the file is complete when the tensors
    are filled and no longer used.

    Args:
        path: Of a file that does not exist.
        rows: Name to shape and dtype.

    Returns:
        Name to tensor, all zero.

    Raises:
        CheckpointError: The format has no such element type.
        OSError: The disk has no room for all of it.

    Example:
        >>> import tempfile, safetensors.torch
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "new.safetensors"
        ...     create_safetensors(path, {"a": ((2,), torch.float32)})["a"].fill_(0.5)
        ...     safetensors.torch.load_file(path)
        tensor([0.5000, 0.5000])
        {'a': tensor([0.5000, 0.5000])}
    """
    ordered = sorted(rows.items(), key=lambda item: -item[1][1].itemsize)
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in ordered:
        if dtype not in _NAMES:
            raise CheckpointError(f"safetensors have no element type for {name!r}, which is {dtype}.")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    start = 8 + len(header)
    with path.open("xb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()
        _reserve(file.fileno(), start + end)
    everything = torch.from_file(str(path), shared=True, size=start + end, dtype=torch.uint8)
    return {
        name: everything[start + table[name]["data_offsets"][0] : start + table[name]["data_offsets"][1]]
        .view(dtype)
        .view(shape)
        for name, (shape, dtype) in ordered
    }


def _reserve(descriptor: int, size: int) -> None:
    # Writing through a mapping to a full disk would kill the process; this says so before.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)
