"""Read the pickled index of a DCP folder with an unpickler that allows only the index's classes."""

from __future__ import annotations

import pickle
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage

from accel_state.errors import CheckpointError
from accel_state.regular_file import open_regular

if TYPE_CHECKING:
    from pathlib import Path

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
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in _NAMES.items()
        for name in names
        if hasattr(module, name)  # BytesIOWriteData came with torch 2.7
    },
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


def unpickle(path: Path) -> Any:
    """Unpickle an index or a rank's metadata file.

    Args:
        path: The file.

    Raises:
        CheckpointError: The file is damaged, or has objects of classes that are not allowed.
    """
    try:
        with open_regular(path) as file:
            return _Unpickler(file).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        IndexError,
        TypeError,
        ValueError,
        KeyError,
        MemoryError,  # a length that the file lacks; CPython prints a SystemError if it is a bytearray's
        OverflowError,
        RecursionError,
        AssertionError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"{str(path)!r} is not the index of a sharded state: {error}.") from error
