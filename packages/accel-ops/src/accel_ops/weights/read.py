"""Read checkpoints: find their files, refuse unsafe ones, map what can be mapped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, TYPE_CHECKING, Any

import torch

from accel_ops.weights.bin_file import load_bin
from accel_ops.weights.names import (
    INDEX_SUFFIX,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFETENSORS_SUFFIX,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)
from accel_ops.weights.safetensors_file import SafetensorsFile
from accel_state.errors import CheckpointError, some_of
from accel_state.regular_file import read_json

if TYPE_CHECKING:
    import os
    from collections.abc import Container, Mapping

    from torch import Tensor

_SINGLE_FILES = (SAFE_WEIGHTS_NAME, WEIGHTS_NAME)
_INDEXED = (SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_INDEX_NAME)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The files of a checkpoint.

    Attributes:
        files: The weight files, in the order of the index.
        weight_map: Tensor name to its file, when there is an index.
    """

    files: tuple[Path, ...]
    weight_map: dict[str, Path] | None = None


def find_checkpoint_files(checkpoint: str | os.PathLike[str]) -> CheckpointFiles:
    """Find the files of a checkpoint.

    Args:
        checkpoint: A weight file; an index file (`*.json`); or a folder with one of them. In a folder,
            safetensors before `.bin`, whole before shards.

    Raises:
        CheckpointError: The folder has no weights or several indexes, or an index names a file that is
            absent, absolute, or outside its folder.
        FileNotFoundError: Nothing is at that path.
    """
    path = Path(checkpoint)
    if path.is_file():
        return _indexed(path) if path.suffix == ".json" else CheckpointFiles(files=(path,))
    if not path.is_dir():
        raise FileNotFoundError(f"no checkpoint at {str(path)!r}: neither a file nor a folder")
    for name in _SINGLE_FILES:
        if (path / name).is_file():
            return CheckpointFiles(files=(path / name,))
    for name in _INDEXED:
        if (path / name).is_file():
            return _indexed(path / name)
    return _only_index(path)


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, int | str | torch.device] | None = None
) -> dict[str, Tensor]:
    """Read one weight file.

    safetensors are mapped, not read; so are zip-format `.bin` files. What stays on the CPU costs no memory
    until it is used.

    Args:
        checkpoint_file: A `.safetensors` file, or one that `torch.save` wrote.
        device_map: Module name to device. Tensors of modules on an accelerator are moved there; `"cpu"`,
            `"disk"` and names that the map lacks stay on the CPU.

    Raises:
        CheckpointError: The file is damaged, or holds more than plain tensors.
    """
    path = Path(checkpoint_file)
    if path.suffix == SAFETENSORS_SUFFIX:
        file = SafetensorsFile(path)
        tensors = {name: file.tensor(name) for name in file.entries}
    else:
        tensors = load_bin(path)
    if device_map is None:
        return tensors
    return {name: _moved(tensor, device_of(name, device_map)) for name, tensor in tensors.items()}


def load(
    f: str | os.PathLike[str] | IO[bytes],
    map_location: Any = None,
    **kwargs: Any,
) -> Any:
    """Read what `torch.save` wrote, tensors and plain containers only, unless told otherwise.

    Args:
        f: A path or an open binary file.
        map_location: Where tensors go, as `torch.load` takes it.
        **kwargs: More of `torch.load`'s arguments; `weights_only` is True unless given.

    Raises:
        pickle.UnpicklingError: The file holds other objects. `weights_only=False` loads them, and runs
            whatever code its author put in it.
    """
    return torch.load(f, map_location=map_location, **{"weights_only": True, **kwargs})


def device_of(
    name: str, device_map: Mapping[str, int | str | torch.device]
) -> int | str | torch.device | None:
    """Say where a map sends a tensor: the entry with the longest name that contains it, else `None`.

    Example:
        >>> device_of("layers.0.weight", {"layers": 0, "layers.0": "cpu"})
        'cpu'
    """
    entry = entry_of(name, device_map)
    return None if entry is None else device_map[entry]


def entry_of(name: str, entries: Container[str]) -> str | None:
    """Return the entry for a dotted name: itself, else the nearest one above it."""
    while name not in entries:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def _moved(tensor: Tensor, device: int | str | torch.device | None) -> Tensor:
    return tensor if device in (None, "disk", "cpu") else tensor.to(device)


def _indexed(index_file: Path) -> CheckpointFiles:
    content = read_json(index_file, what="index of a checkpoint")
    try:
        table = content.get("weight_map", content)  # without it, as older ones are: that table alone
        pairs = [(name, str(shard)) for name, shard in table.items()]
        if table is content and not all(isinstance(shard, str) for shard in content.values()):
            raise KeyError("weight_map")
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{str(index_file)!r} is no index of a checkpoint: no 'weight_map' table"
        ) from error
    if not pairs:
        raise CheckpointError(f"{str(index_file)!r} is no index of a checkpoint: it names no tensor")
    checked = {shard: _inside(index_file, shard) for shard in dict.fromkeys(shard for _, shard in pairs)}
    absent = sorted(shard for shard, path in checked.items() if not path.is_file())
    if absent:
        raise CheckpointError(
            f"{str(index_file)!r} names absent files: {some_of(absent)}; fetch them, or save again"
        )
    return CheckpointFiles(
        files=tuple(checked.values()), weight_map={name: checked[shard] for name, shard in pairs}
    )


def _inside(index_file: Path, shard: str) -> Path:
    """Refuse a shard that an index places elsewhere: it would be read with the rights of whoever loads it."""
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    if posix.is_absolute() or windows.drive or windows.root or ".." in windows.parts or not windows.parts:
        raise CheckpointError(
            f"{str(index_file)!r} names the shard {shard!r}, outside its folder; refused as unsafe"
        )
    return index_file.parent / shard


def _only_index(folder: Path) -> CheckpointFiles:
    indexes = sorted(folder.glob(f"*{INDEX_SUFFIX}"))
    if len(indexes) == 1:
        return _indexed(indexes[0])
    single = sorted(folder.glob(f"*{SAFETENSORS_SUFFIX}")) if not indexes else []
    if len(single) == 1:
        return CheckpointFiles(files=(single[0],))
    seen = some_of(path.name for path in indexes or single) or "none"
    wanted = " or ".join((*_SINGLE_FILES, *_INDEXED))
    raise CheckpointError(f"{str(folder)!r} has no single checkpoint: looked for {wanted}; found {seen}")
