"""Unpickle tensors, plain containers, and numpy's numbers, texts and arrays, but no other objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_reconstruct: Any = np.ndarray(0).__reduce__()[0]
_scalar: Any = np.float64(0).__reduce__()[0]
_NUMPY_TYPES = [type(np.dtype(code)) for code in "?bhilqBHILQefdFDU"]
SAFE: list[Any] = [
    (_reconstruct, "numpy.core.multiarray._reconstruct"),  # its name in numpy 1
    (_reconstruct, "numpy._core.multiarray._reconstruct"),
    (_scalar, "numpy.core.multiarray.scalar"),
    (_scalar, "numpy._core.multiarray.scalar"),
    np.ndarray,
    np.dtype,
    *_NUMPY_TYPES,
]
"""What files may hold besides tensors and plain containers."""


def load_safely(file: Any, **kwargs: Any) -> Any:
    """Read a file of `torch.save`: tensors on the CPU, numpy's values and plain containers.

    Args:
        file: A path or an open binary file.
        **kwargs: As for `torch.load`. `weights_only=False` reads any object, and runs whatever its author put
            into the file.

    Raises:
        pickle.UnpicklingError: The file holds other objects.
    """
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, **kwargs}
    with torch.serialization.safe_globals(SAFE):
        return torch.load(file, **options)
