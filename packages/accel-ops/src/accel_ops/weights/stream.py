"""Write safetensors: as a stream, from where the tensors are; or mapped, to be filled in any order."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from accel_ops.weights.safetensors_header import DTYPE_NAMES, make_header
from accel_ops.weights.tensors import tensor_memory
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)
_ALIGNMENT = 8
_MAPPED_ALIGNMENT = 16


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Remove aliases and make every tensor contiguous.

    A tensor under two names is kept under the first; loading ties it again. Different parts of one storage
    (the halves of a fused weight) are all kept, each in memory of its own.

    Args:
        state_dict: Name to tensor; values that are no tensors stay as they are.

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
        if not isinstance(value, Tensor) or value.is_meta:
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
        _log.warning("Weights under a second name are saved once: %s.", ", ".join(dropped))
    return cleaned


class ByteSink(Protocol):
    """What bytes are written to, such as a binary file."""

    def write(self, data: Any, /) -> object:
        """Take an object with the buffer interface; its memory may change afterwards."""
        ...


def write_safetensors(tensors: Mapping[str, Tensor], sink: ByteSink) -> None:
    """Write tensors as one safetensors file.

    Args:
        tensors: Name to tensor, no two of which share memory; see `clean_state_dict_for_safetensors`.
        sink: Gets the bytes in order, large tensors in one piece.

    Raises:
        CheckpointError: A value is no dense tensor, or of a type that the format does not have.

    Example:
        >>> import io, safetensors.torch, torch
        >>> stream = io.BytesIO()
        >>> write_safetensors({"weight": torch.ones(2)}, stream)
        >>> safetensors.torch.load(stream.getvalue())
        {'weight': tensor([1., 1.])}
    """
    # Large elements first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: -_checked(*item).dtype.itemsize)
    rows = ((name, tuple(tensor.shape), tensor.dtype) for name, tensor in ordered)
    sink.write(make_header(rows, _ALIGNMENT)[0])
    for _, tensor in ordered:
        if tensor.numel():
            sink.write(as_bytes(tensor.detach().cpu()))


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
    header, spans = make_header(((name, shape, dtype) for name, (shape, dtype) in ordered), _MAPPED_ALIGNMENT)
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


def as_bytes(tensor: Tensor) -> memoryview:
    r"""Show the contents of a tensor on the CPU as bytes; without a copy, if it is contiguous.

    Example:
        >>> import torch
        >>> bytes(as_bytes(torch.tensor([1, 2], dtype=torch.int16)))
        b'\x01\x00\x02\x00'
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return memoryview(plain.view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType] - an array is a buffer


def _checked(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor) or value.is_sparse or value.is_quantized or value.is_meta:
        kind = type(value).__name__ if not isinstance(value, Tensor) else f"tensor on {value.device}"
        raise CheckpointError(
            f"safetensors hold dense tensors with values; {name!r} is a {kind}. Keep it out of the state "
            "dict, or pass safe_serialization=False."
        )
    if value.dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"safetensors have no element type for {name!r}, which is {value.dtype}; pass "
            "safe_serialization=False."
        )
    return value
