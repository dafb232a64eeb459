"""The index of a DCP folder: made from the notes of all ranks, and read."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from accel_plugins.dcp.layout import INDEX_NAME, local_metadata_file
from accel_plugins.dcp.unpickle import unpickle
from accel_state.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A value that is in a folder.

    Args:
        key: Under which it is filed.
        path: The keys of nested dictionaries, and places in lists, that lead to it.
        shape: Of the whole tensor; `None` for an object that is no tensor.
        dtype: Of the tensor.
    """

    key: str
    path: tuple[str | int, ...]
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def write_index(folder: Path, ranks: Iterable[int]) -> list[str]:
    """Make the index of a folder when every rank has written its part, and remove the notes.

    Args:
        folder: The folder.
        ranks: Those that have written.

    Returns:
        The names of the notes.

    Raises:
        CheckpointError: What they have written does not make whole tensors.
        OSError: A note is absent, or the index cannot be written.
    """
    metadata_files = [folder / local_metadata_file(rank) for rank in ranks]
    found = [unpickle(note) for note in metadata_files]
    try:
        _, index = DefaultSavePlanner().create_global_plan([plan for plan, _ in found])
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            f"What the ranks wrote to {str(folder)!r} does not make whole tensors: {error}. Prepare the same "
            "objects on every rank."
        ) from error
    index.storage_data = {result.index: result.storage_data for _, results in found for result in results}
    index.storage_meta = StorageMeta()
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    for note in metadata_files:
        note.unlink()
    return [note.name for note in metadata_files]


def read_index(folder: Path) -> Metadata:
    """Read the index of a folder.

    Raises:
        CheckpointError: It is absent or damaged, or names files outside of the folder.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{str(folder)!r} has no {INDEX_NAME!r}: it is no folder of a sharded state, or was not "
            "completed."
        )
    index = unpickle(path)
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{str(path)!r} is no index of a sharded state.")
    storage_data: Mapping[Any, Any] = index.storage_data
    try:
        entries(index)
        names = [PurePath(place.relative_path) for place in storage_data.values()]
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is no index of a sharded state: {error}.") from error
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(f"{str(path)!r} names {str(name)!r}, which is not in its folder.")
    return index


def entries(index: Metadata) -> list[Entry]:
    """Everything that an index lists."""
    paths: Mapping[str, tuple[str | int, ...]] = index.planner_data or {}
    return [
        Entry(key=key, path=paths.get(key, (key,)), shape=row.size, dtype=row.properties.dtype)
        if isinstance(row, TensorStorageMetadata)
        else Entry(key=key, path=paths.get(key, (key,)))
        for key, row in index.state_dict_metadata.items()
    ]
