"""Serialise the objects of a checkpoint, and load them without executing code of the file."""

from __future__ import annotations

import pickle
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_ops.weights.stream import clean_state_dict_for_safetensors, write_safetensors
from accel_state.errors import CheckpointError
from accel_state.versions import is_torch_version
from accel_train.checkpoint.staging import on_host

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from accel_ops.weights.stream import ByteSink

_IS_PER_THREAD = is_torch_version(">=", "2.15")
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


def write_weights(state: Mapping[str, Any], sink: ByteSink, *, safe: bool) -> None:
    """Write the state dict of a model."""
    if safe:
        write_safetensors(clean_state_dict_for_safetensors(state), sink)
    else:
        write_object(dict(state), sink)


def write_object(obj: Any, sink: Any) -> None:
    """Write an object as `torch.save` does, with tensors of devices on the CPU."""
    # The manifest has better checksums than `torch.save`. Before torch 2.15 the option may be that of
    # all threads, the user's among them: there it stays as it is.
    with _crc_off() if _IS_PER_THREAD else nullcontext():
        torch.save(on_host(obj), sink)


def read_object(path: Path, *, file: Any = None, **kwargs: Any) -> Any:
    """Read what `write_object` or another library wrote: tensors, arrays of numbers and plain containers.

    Args:
        path: The file.
        file: The same, if it is open.
        **kwargs: As for `torch.load`. `weights_only=False` reads any object, and runs whatever its author put
            into the file.

    Raises:
        CheckpointError: The file holds other objects, or is damaged.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, **kwargs}
    try:
        with torch.serialization.safe_globals(SAFE):
            return torch.load(path if file is None else file, **options)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()
        raise CheckpointError(
            f"{str(path)!r} holds objects that can only be read by running code from the file. "
            "If you trust who wrote it, pass load_kwargs={'weights_only': False}, or name the classes with "
            f"torch.serialization.add_safe_globals. ({next((x for x in reason if 'GLOBAL' in x), reason[0])})"
        ) from error
    except (EOFError, RuntimeError) as error:
        raise CheckpointError(f"{str(path)!r} is damaged: {str(error).splitlines()[0]}") from error


@contextmanager
def _crc_off() -> Generator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
