"""Find and read weight files: `find_checkpoint_files`, `load_state_dict`, `load`."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, cast

import torch
from torch import Tensor

from accel_ops.weights.layout import (
    INDEX_SUFFIX,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFETENSORS_SUFFIX,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state.errors import CheckpointError, first_line, some_of
from accel_state.files import any_path, read_json
from accel_state.frozen import frozen
from accel_state.platforms import can_replace_mapped
from accel_state.remote import AnyPath, RemotePath


@frozen
class CheckpointFiles:
    """The files of a checkpoint.

    Attributes:
        files: The weight files, in the order of the index.
        weight_map: Tensor name to its file, if there is an index.
    """

    files: tuple[AnyPath, ...]
    weight_map: dict[str, AnyPath] | None = None


READ_ORDER = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)
"""The files of a folder that are read: the first of these."""


def find_checkpoint_files(checkpoint: str | os.PathLike[str] | RemotePath) -> CheckpointFiles:
    """Find the files of a checkpoint.

    Args:
        checkpoint: A weight file; an index file (`*.json`); or a folder with one of them; or an fsspec URL of
            these. In a folder, safetensors is preferred to `.bin`, a single file to shards.

    Raises:
        CheckpointError: The folder has no weights or several indexes, or an index names a file that is
            absent, absolute, or outside its folder.
        FileNotFoundError: The path does not exist.
    """
    path = any_path(checkpoint, "checkpoint")
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else CheckpointFiles(files=(path,))
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint at {str(path)!r}: neither a file nor a folder")
    for name in READ_ORDER:
        if (path / name).is_file():
            return find_checkpoint_files(path / name)
    return _only_index(path)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str] | RemotePath,
    device_map: Mapping[str, int | str | torch.device] | None = None,
) -> dict[str, Tensor]:
    """Read one weight file.

    safetensors files are mapped: tensors on the CPU take no memory until they are used. Other files, and
    files of an object store, are read: `torch.save` may overwrite a `.bin` file while its tensors are in use.

    Args:
        checkpoint_file: A `.safetensors` file, or a file of `torch.save`; or an fsspec URL.
        device_map: Module name to device. Tensors of modules on an accelerator are moved there; all others
            (`"cpu"`, `"disk"`, or not in the map) stay on the CPU.

    Raises:
        CheckpointError: The file is damaged, or holds more than plain tensors.
    """
    path = any_path(checkpoint_file, "checkpoint_file")
    if path.suffix == SAFETENSORS_SUFFIX:
        file = SafetensorsFile(path)
        get = file.tensor if can_replace_mapped() else file.read
        tensors = {name: get(name) for name in file.entries}
    else:
        tensors = load_bin(path)
    if device_map is None:
        return tensors
    devices = {name: device_of(name, device_map) for name in tensors}
    return {
        name: tensor.to(devices[name])
        if isinstance(tensor, Tensor) and devices[name] not in (None, "disk", "cpu")
        else tensor
        for name, tensor in tensors.items()
    }


def load(f: str | os.PathLike[str] | IO[bytes], map_location: Any = None, **kwargs: Any) -> Any:
    """Read a file of `torch.save`: by default tensors and plain containers only.

    Args:
        f: A path or an open binary file.
        map_location: Device of the tensors, as in `torch.load`.
        **kwargs: Further arguments of `torch.load`; `weights_only` defaults to True.

    Raises:
        pickle.UnpicklingError: The file contains other objects. `weights_only=False` loads them, which
            may execute arbitrary code from the file.
    """
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def device_of(
    name: str, device_map: Mapping[str, int | str | torch.device]
) -> int | str | torch.device | None:
    """Return the device of a tensor, from the longest entry that contains its name, else `None`.

    Example:
        >>> device_of("layers.0.weight", {"layers": 0, "layers.0": "cpu"})
        'cpu'
    """
    entry = entry_of(name, device_map)
    return None if entry is None else device_map[entry]


def entry_of(name: str, entries: Container[str]) -> str | None:
    """Return the entry for a dotted name: the name, else its nearest ancestor."""
    while name not in entries:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _indexed(index_file: AnyPath) -> CheckpointFiles:
    content = read_json(index_file, what="index of a checkpoint")
    try:
        table = content.get("weight_map", content)  # Legacy indexes consist of that table only.
        pairs = [(name, str(shard)) for name, shard in table.items()]
        if table is content and not all(isinstance(shard, str) for shard in content.values()):
            raise KeyError("weight_map")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{str(index_file)!r} is not a valid index of a checkpoint: no 'weight_map' table"
        ) from error
    if not pairs:
        raise CheckpointError(f"{str(index_file)!r} is not a valid index of a checkpoint: it names no tensor")
    checked = {
        shard: _path_of_shard(index_file, shard) for shard in dict.fromkeys(shard for _, shard in pairs)
    }
    absent = sorted(shard for shard, path in checked.items() if not path.is_file())
    if absent:
        raise CheckpointError(
            f"{str(index_file)!r} names absent files: {some_of(absent)}; fetch them, or save again"
        )
    return CheckpointFiles(
        files=tuple(checked.values()), weight_map={name: checked[shard] for name, shard in pairs}
    )


def _path_of_shard(index_file: AnyPath, shard: str) -> AnyPath:
    """Return the path of a shard; raise if it is outside the folder, which is unsafe."""
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    if posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts or not windows.parts:
        raise CheckpointError(
            f"{str(index_file)!r} names the shard {some_of([shard])!r}, outside its folder; refused as unsafe"
        )
    return index_file.parent / shard


def _only_index(folder: AnyPath) -> CheckpointFiles:
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"), key=str)
    if len(indexes) == 1:
        return _indexed(indexes[0])
    single = sorted(folder.glob(f"*{SAFETENSORS_SUFFIX}"), key=str) if not indexes else []
    if len(single) == 1:
        return CheckpointFiles(files=(single[0],))
    present = some_of(path.name for path in indexes or single or sorted(folder.glob("*.bin"), key=str))
    advice = f"{present}: pass the file itself" if present else "none"
    wanted = " or ".join(READ_ORDER)
    raise CheckpointError(f"{str(folder)!r} has no single checkpoint: looked for {wanted}; found {advice}")


def load_bin(path: AnyPath, *, mapped: bool = False) -> dict[str, Tensor]:
    """Read a state dict.

    Args:
        path: A file of `torch.save`.
        mapped: Map the tensors of a zip-format file. Whoever keeps them must copy them: `torch.save` to the
            same path would overwrite their memory.

    Raises:
        CheckpointError: The file is damaged, or holds more than plain tensors.
    """
    mmap = mapped and isinstance(path, Path) and is_mappable(path)
    with path.open("rb") as file:
        try:
            source: Any = path if mmap else file
            state_dict = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:
            raise CheckpointError(
                f"{str(path)!r} cannot be loaded: it is damaged, or it holds more than tensors and would "
                f"have to run code to load. Save it again, best as safetensors. ({first_line(error)})"
            ) from error
    if not isinstance(state_dict, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(state_dict).__name__!r}, not a state dict")
    return cast("dict[str, Tensor]", state_dict)


def is_mappable(path: Path) -> bool:
    """Return whether `torch.load(mmap=True)` reads a file: files of torch before 1.6 must be read in full."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
