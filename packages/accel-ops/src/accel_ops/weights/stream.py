"""Write safetensors as a stream: a header, then every tensor's bytes from where they are, without copies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from accel_ops.weights.safetensors_header import DTYPE_NAMES, make_header
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALIGNMENT = 8


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
