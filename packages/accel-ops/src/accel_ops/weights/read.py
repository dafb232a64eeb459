"""Find and read weight files: `find_checkpoint_files`, `load_state_dict`, `load`."""

from __future__ import annotations

import os
import pickletools
import zipfile
from collections.abc import Container, Iterator, Mapping
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
from accel_ops.weights.mapped import can_replace_mapped
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_state.errors import CheckpointError, first_line, some_of
from accel_state.files import JSON_LIMIT, any_path, open_regular, read_json
from accel_state.frozen import frozen
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
    try:
        with open_regular(path) as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            if is_zip:
                check_records(file)
            if isinstance(path, RemotePath):
                file.seek(0)
                state_dict = torch.load(file, map_location="cpu", weights_only=True)
            else:
                state_dict = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip and mapped)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be loaded: it is damaged, or it holds more than tensors and would have to "
            f"run code to load. Save it again, best as safetensors. ({first_line(error)})"
        ) from error
    if not isinstance(state_dict, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(state_dict).__name__!r}, not a state dict")
    return cast("dict[str, Tensor]", state_dict)


def is_mappable(path: Path) -> bool:
    """Return whether `torch.load(mmap=True)` reads a file correctly, that is, only within its records.

    Other files, such as damaged ones or files of torch before 1.6, must be read in full. The checksum of the
    pickle is not compared: checkpoints have better checksums in their manifest, and none in the archive.
    """
    with open_regular(path) as file:
        if file.read(len(_ZIP)) != _ZIP:
            return False
        try:
            check_records(file, has_checksum=False)
        except Exception:  # noqa: BLE001 - a damaged archive or pickle may raise anything
            return False
    return True


_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30
_ITEM_SIZES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2,
    "LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1,
    "BoolStorage": 1,
    "ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "UntypedStorage": 1,
    "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip


def check_records(file: IO[bytes], *, has_checksum: bool = True) -> None:
    """Raise a ValueError if a record of an archive differs in size from the storage in its pickle.

    `torch.load` with `mmap` does not compare them: it reads beyond a record that is too short.
    """
    with zipfile.ZipFile(file) as archive:
        rows = archive.infolist()
        records = {row.filename: row for row in rows}
        top = rows[0].filename.partition("/")[0] if rows else ""
        pickled = records.get(f"{top}/data.pkl")
        if len(records) < len(rows) or pickled is None or rows[0].header_offset:
            raise ValueError("it is not an archive of torch.save")
        if pickled.file_size > JSON_LIMIT:
            raise ValueError(f"its pickle is larger than {JSON_LIMIT} bytes")
        _stored_bytes(archive, pickled)
        content = archive.read(pickled) if has_checksum else _raw_content(file, pickled)
        for key, size in set(_storages(content)):
            record = records.get(f"{top}/data/{key}")
            stored = None if record is None else _stored_bytes(archive, record)
            if stored != size:
                raise ValueError(f"record {key!r} has {stored or 0} bytes, its tensors need {size}")


def _stored_bytes(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> int:
    """Return the bytes of a record that can be mapped, that is, uncompressed and complete."""
    with archive.open(record):  # Opening compares the record with the header in front of it.
        pass
    end = record.header_offset + _LOCAL_HEADER + len(record.filename) + record.file_size
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ValueError(f"record {record.filename!r} is compressed")
    if end > archive.start_dir:
        raise ValueError(f"record {record.filename!r} is not whole")
    return record.file_size


def _raw_content(file: IO[bytes], record: zipfile.ZipInfo) -> bytes:
    """Read an uncompressed record, whose checksum may be absent."""
    file.seek(record.header_offset)
    header = file.read(_LOCAL_HEADER)
    # The lengths of the name and of the padding after it:
    # https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT
    lengths = (int.from_bytes(header[begin : begin + 2], "little") for begin in (26, 28))
    file.seek(record.header_offset + _LOCAL_HEADER + sum(lengths))
    return file.read(record.file_size)


def _storages(pickled: bytes) -> Iterator[tuple[str, int]]:
    """Parse a pickle without executing it; yield key and bytes of every storage."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, arg, _ in pickletools.genops(pickled):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif "PUT" in name:
            memo[arg] = stack[-1]
        elif "GET" in name:
            stack.append(memo[arg])
        elif name == "BINPERSID":
            yield _storage(stack[-1])
        else:
            _apply(stack, opcode, arg)


def _apply(stack: list[Any], opcode: pickletools.OpcodeInfo, arg: Any) -> None:
    """Apply a pickle opcode to a stack; objects other than strings, numbers and tuples become None."""
    operands = opcode.stack_before
    if pickletools.markobject in operands:
        mark = len(stack) - 1 - stack[::-1].index(pickletools.markobject)
        items = stack[mark + 1 :]
        del stack[mark:]
        operands = operands[: operands.index(pickletools.markobject)]
    else:
        items = stack[len(stack) - len(operands) :]
    if len(operands) > len(stack):
        raise ValueError("its pickle is damaged")
    del stack[len(stack) - len(operands) :]
    if opcode.name.startswith("TUPLE"):
        stack.append(tuple(items))
    elif opcode.name == "MARK":
        stack.append(pickletools.markobject)
    elif opcode.name == "DUP":
        stack += [items[0]] * 2
    else:
        stack += [arg] * len(opcode.stack_after)


def _storage(saved: Any) -> tuple[str, int]:
    match saved:
        case ("storage", str(kind), str(key), str(), int(count)) if count >= 0:
            module, _, name = kind.rpartition(" ")
            if module in ("torch", "torch.storage") and name in _ITEM_SIZES:
                return key, count * _ITEM_SIZES[name]
        case _:
            pass
    raise ValueError(f"its pickle names {str(saved)[:100]!r} in place of a storage")
