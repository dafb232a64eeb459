"""Weight files that `torch.save` wrote: mapped, if each record is as long as the tensors that use it.

`torch.load` with `mmap` does not compare them: where a record is too short it reads what follows in the file.
"""

from __future__ import annotations

import pickletools
import zipfile
from typing import TYPE_CHECKING, Any, cast

import torch

from accel_state.errors import CheckpointError
from accel_state.regular_file import JSON_LIMIT, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from pathlib import Path

    from torch import Tensor

_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30
_ITEM_SIZES = {
    "DoubleStorage": 8, "FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2,
    "LongStorage": 8, "IntStorage": 4, "ShortStorage": 2, "CharStorage": 1, "ByteStorage": 1,
    "BoolStorage": 1,
    "ComplexDoubleStorage": 16, "ComplexFloatStorage": 8, "UntypedStorage": 1,
    "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "QUInt4x2Storage": 1, "QUInt2x4Storage": 1,
}  # fmt: skip


def load_bin(path: Path) -> dict[str, Tensor]:
    """Read a state dict; the zip format is mapped, the format from before torch 1.6 is read.

    Raises:
        CheckpointError: The file is damaged, or holds more than plain tensors.
    """
    try:
        with open_regular(path) as file:
            is_zip = file.read(len(_ZIP)) == _ZIP
            if is_zip:
                _check_records(file)
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]  # an empty file says nothing
        raise CheckpointError(
            f"{str(path)!r} cannot be loaded: it is damaged, or it holds more than tensors and would have to "
            f"run code to load. Save it again, best as safetensors. ({reason})"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{str(path)!r} holds a {type(found).__name__!r}, not a state dict")
    return cast("dict[str, Tensor]", found)


def _check_records(file: BufferedReader) -> None:
    """Raise a ValueError if a record of an archive is not as long as the storage that its pickle asks for."""
    with zipfile.ZipFile(file) as archive:
        rows = archive.infolist()
        records = {row.filename: row for row in rows}
        top = rows[0].filename.partition("/")[0] if rows else ""
        pickled = records.get(f"{top}/data.pkl")
        if len(records) < len(rows) or pickled is None or rows[0].header_offset:
            raise ValueError("it is no archive of torch.save")
        if pickled.file_size > JSON_LIMIT:
            raise ValueError(f"its pickle is larger than {JSON_LIMIT} bytes")
        for key, size in set(_storages(archive.read(pickled))):
            record = records.get(f"{top}/data/{key}")
            held = None if record is None else _stored_bytes(archive, record)
            if held != size:
                raise ValueError(f"record {key!r} has {held or 0} bytes, its tensors need {size}")


def _stored_bytes(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> int:
    """Bytes that lie in the archive as they are, for mapping."""
    with archive.open(record):  # compares the record with the header in front of it
        pass
    end = record.header_offset + _LOCAL_HEADER + len(record.filename) + record.file_size
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ValueError(f"record {record.filename!r} is compressed")
    if end > archive.start_dir:
        raise ValueError(f"record {record.filename!r} is not whole")
    return record.file_size


def _storages(pickled: bytes) -> Iterator[tuple[str, int]]:
    """Key and bytes of every storage that a pickle names. The pickle is parsed; nothing of it is executed."""
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
    """Change a stack as an opcode would, with None for every object but texts, numbers and tuples."""
    taken = opcode.stack_before
    if pickletools.markobject in taken:
        at = len(stack) - 1 - stack[::-1].index(pickletools.markobject)
        items = stack[at + 1 :]
        del stack[at:]
        taken = taken[: taken.index(pickletools.markobject)]
    else:
        items = stack[len(stack) - len(taken) :]
    if len(taken) > len(stack):
        raise ValueError("its pickle is damaged")
    del stack[len(stack) - len(taken) :]
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
