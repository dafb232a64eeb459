"""A new safetensors file whose tensors are mapped, to be filled in any order without having all in memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from accel_ops.weights.safetensors_header import make_header

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

_ALIGNMENT = 16


def create_safetensors(
    path: Path, rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor]:
    """Make a safetensors file with room for some tensors.

    The system writes out what is filled in when it needs the memory; the file is complete when the tensors
    are filled and no longer used.

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
    header, spans = make_header(((name, shape, dtype) for name, (shape, dtype) in ordered), _ALIGNMENT)
    size = spans[-1][1] if spans else len(header)
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        _reserve(file.fileno(), size)
    everything = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
    return {
        name: everything[begin:end].view(dtype).view(shape)
        for (name, (shape, dtype)), (begin, end) in zip(ordered, spans, strict=True)
    }


def _reserve(descriptor: int, size: int) -> None:
    # Writing through a mapping to a full disk would kill the process; this says so before.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)
