"""The `index.json` of an offload folder: read, validated, extended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_bigmodel.placement import torch_dtype
from accel_ops.weights.names import OFFLOAD_INDEX_NAME
from accel_state.errors import CheckpointError
from accel_state.regular_file import read_json

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    Index = dict[str, dict[str, Any]]


def save_offload_index(index: Index, offload_folder: str | os.PathLike[str]) -> None:
    """Add entries to a folder's `index.json`."""
    if not index:
        return
    path = Path(offload_folder) / OFFLOAD_INDEX_NAME
    known = read_offload_index(offload_folder) if path.is_file() else {}
    path.write_text(json.dumps({**known, **index}, indent=2) + "\n", encoding="utf-8")


def read_offload_index(offload_folder: str | os.PathLike[str]) -> Index:
    """Read a folder's `index.json`.

    Raises:
        CheckpointError: It is no index, or an entry is damaged.
        FileNotFoundError: There is none.
    """
    path = Path(offload_folder) / OFFLOAD_INDEX_NAME
    found = read_json(path, what="index of offloaded weights")
    if not isinstance(found, dict):
        raise CheckpointError(f"{str(path)!r} is no index of offloaded weights: it holds no table of names")
    check_offload_index(found, str(path))
    return found


def check_offload_index(index: Mapping[str, Any], source: str) -> None:
    """Refuse an index with an entry that describes no tensor.

    Example:
        >>> check_offload_index({"w": {"dtype": "float32", "shape": [2]}}, "offload_index")
    """
    for name, entry in index.items():
        if not _is_sound(entry) or not _is_text(name):
            raise CheckpointError(
                f"the entry of {name!r} in {source} describes no offloaded weight: {str(entry)[:200]!r}; it "
                "needs a 'dtype' and a list of whole numbers as 'shape', or a 'safetensors_file'. Offload "
                "the weights again"
            )


def _is_sound(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    dtype = entry.get("dtype")
    try:
        found = torch_dtype(dtype)
    except ValueError:
        return False
    # "float" and "int" have 64 bits in numpy, whose names an index has, and 32 in torch.
    if found is not None and str(found).removeprefix("torch.") != str(dtype).removeprefix("torch."):
        return False
    if entry.get("safetensors_file"):
        return isinstance(entry["safetensors_file"], str) and isinstance(entry.get("weight_name", ""), str)
    shape = entry.get("shape")
    return (
        isinstance(shape, list | tuple)
        and all(type(length) is int and length >= 0 for length in shape)
        and math.prod(max(length, 1) for length in shape[:64]) < 2**59  # what torch can count
        and dtype is not None
    )


def _is_text(name: str) -> bool:
    """Half of a surrogate pair and a null, which JSON may hold, are in no file's name."""
    return not any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in name)
