"""The index of a DCP folder: merge it from the metadata of all ranks, and read it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from accel_plugins.dcp.layout import INDEX_NAME, local_metadata_file
from accel_state.errors import CheckpointError
from accel_state.regular_file import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One value of a DCP folder; one without a shape is an object that is no tensor.

    `path` has the keys of nested dictionaries, and indices of lists, that lead to it.
    """

    key: str
    path: tuple[str | int, ...]
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def write_index(folder: Path, ranks: Iterable[int]) -> list[str]:
    """Merge the metadata files of all ranks into the index of a DCP folder; remove and name them."""
    metadata_files = [folder / local_metadata_file(rank) for rank in ranks]
    found = [unpickle(file) for file in metadata_files]
    try:
        _, index = DefaultSavePlanner().create_global_plan([plan for plan, _ in found])
    except (ValueError, AssertionError) as error:
        raise CheckpointError(
            f"The shards that the ranks wrote to {str(folder)!r} do not add up to full tensors: {error}. "
            "Prepare the same objects on every rank."
        ) from error
    index.storage_data = {result.index: result.storage_data for _, results in found for result in results}
    index.storage_meta = StorageMeta()
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    for file in metadata_files:
        file.unlink()
    return [file.name for file in metadata_files]


def read_index(folder: Path) -> Metadata:
    """Read the index of a DCP folder."""
    path = folder / INDEX_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{str(folder)!r} has no {INDEX_NAME!r}: it is not the folder of a sharded state, or its save "
            "was not completed."
        )
    index = unpickle(path)
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise CheckpointError(f"{str(path)!r} is not the index of a sharded state.")
    storage_data: Mapping[Any, Any] = index.storage_data
    try:
        entries(index)
        names = [PurePath(stored.relative_path) for stored in storage_data.values()]
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is not the index of a sharded state: {error}.") from error
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(f"{str(path)!r} names {str(name)!r}, which is not in its folder.")
    return index


def entries(index: Metadata) -> list[Entry]:
    """List the values of an index."""
    paths: Mapping[str, tuple[str | int, ...]] = index.planner_data or {}
    return [
        Entry(key=key, path=paths.get(key, (key,)), shape=row.size, dtype=row.properties.dtype)
        if isinstance(row, TensorStorageMetadata)
        else Entry(key=key, path=paths.get(key, (key,)))
        for key, row in index.state_dict_metadata.items()
    ]


_NAMES = {
    metadata: (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
    planner: ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    storage: ("WriteResult",),
}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(module.__name__, name): getattr(module, name) for module, names in _NAMES.items() for name in names},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,  # pyright: ignore[reportPrivateUsage] - how a layout is pickled
    **{
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return one of the allowed classes."""
        found = _ALLOWED.get((module_name, global_name))
        if found is None and module_name == "torch":
            found = getattr(torch, global_name, None)
            found = found if isinstance(found, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in an index")
        return found


DAMAGE = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,  # a length that the file lacks; CPython prints a SystemError if it is a bytearray's
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""Raised by pickle and torch for damaged bytes, and for pickles that would run code."""


def unpickle(path: Path) -> Any:
    """Unpickle an index or a rank's metadata file.

    Raises:
        CheckpointError: The file is damaged, or has objects of classes that are not allowed.
    """
    try:
        with open_regular(path) as file:
            return _Unpickler(file).load()
    except DAMAGE as error:
        raise CheckpointError(f"{str(path)!r} is not the index of a sharded state: {error}.") from error
