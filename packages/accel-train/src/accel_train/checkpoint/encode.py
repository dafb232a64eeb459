"""How objects become the bytes of a checkpoint, and bytes become objects without running anybody's code."""

from __future__ import annotations

import pickle
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accel_ops.weights.clean import clean_state_dict_for_safetensors
from accel_ops.weights.stream import write_safetensors
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from pathlib import Path

    from accel_ops.weights.stream import ByteSink

_reconstruct: Any = np.ndarray(0).__reduce__()[0]
_NUMPY_TYPES = [type(np.dtype(code)) for code in "?bhilqBHILQefdFD"]
SAFE: list[Any] = [
    _reconstruct,
    (_reconstruct, "numpy.core.multiarray._reconstruct"),  # as numpy 1 calls it
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    np.ndarray,
    np.dtype,
    *_NUMPY_TYPES,
]
"""What may be built while reading, beside tensors and plain containers: arrays of numbers."""


def write_weights(
    state: Mapping[str, Any], sink: ByteSink, *, safe: bool, to_host: Callable[[Tensor], Tensor] | None = None
) -> None:
    """Write the state dict of a model.

    Args:
        state: Name to tensor.
        sink: Gets the bytes.
        safe: As safetensors, tensors with two names once; else as `torch.save` does.
        to_host: What copies a tensor from a device to the CPU; `Tensor.cpu` if `None`.
    """
    if safe:
        tensors = clean_state_dict_for_safetensors(state)
        write_safetensors(tensors, sink, to_host=to_host or Tensor.cpu)
    else:
        write_object(dict(state), sink, to_host=to_host)


def write_object(obj: Any, sink: Any, *, to_host: Callable[[Tensor], Tensor] | None = None) -> None:
    """Write an object as `torch.save` does; the bytes of tensors on the CPU come from where they are.

    Args:
        obj: Tensors and plain containers, if it shall be read back without trust.
        sink: Gets the bytes.
        to_host: What copies a tensor from a device to the CPU; torch itself, one after the other, if `None`.
    """
    if to_host is not None:
        obj = _on_host(obj, to_host)
    with _without_crc():
        torch.save(obj, sink)


def read_object(path: Path, **kwargs: Any) -> Any:
    """Read what `write_object` or another library wrote: tensors, arrays of numbers and plain containers.

    Args:
        path: The file.
        **kwargs: As for `torch.load`. `weights_only=False` reads any object, and runs whatever its author put
            into the file.

    Raises:
        CheckpointError: The file holds other objects, or is damaged.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, **kwargs}
    try:
        with torch.serialization.safe_globals(SAFE):
            return torch.load(path, **options)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{str(path)!r} holds objects that can only be read by running code from the file. "
            "If you trust who wrote it, pass load_kwargs={'weights_only': False}, or name the classes with "
            f"torch.serialization.add_safe_globals. ({next((x for x in reason if 'GLOBAL' in x), reason[0])})"
        ) from error
    except (EOFError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {str(error).splitlines()[0]}") from error


def _on_host(obj: Any, to_host: Callable[[Tensor], Tensor]) -> Any:
    """The same nested plain containers with tensors of devices on the CPU; other objects as they are."""
    if isinstance(obj, Tensor):
        return obj if obj.device.type in {"cpu", "meta"} else to_host(obj.detach())
    if type(obj) is dict:
        return {key: _on_host(value, to_host) for key, value in obj.items()}
    if type(obj) in {list, tuple}:
        return type(obj)(_on_host(value, to_host) for value in obj)
    return obj


@contextmanager
def _without_crc() -> Generator[None]:
    """Within it, `torch.save` computes no checksums: there are better ones in the manifest."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
