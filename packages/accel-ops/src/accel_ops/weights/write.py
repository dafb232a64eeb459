"""Write weight files: `save`, `save_state_dict`.

Files are written under a temporary name and renamed, so that mapped files are never overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from accel_ops.tree import recursively_apply, walk
from accel_ops.weights.layout import (
    DEFAULT_SHARD_SIZE,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_PATTERN_NAME,
    WeightShards,
    convert_file_size_to_int,
    fill_shards,
    groups_of,
    numbered,
)
from accel_ops.weights.read import READ_ORDER
from accel_ops.weights.safetensors_io import clean_state_dict_for_safetensors, write_safetensors
from accel_ops.weights.tensors import tensor_memory
from accel_state import runtime
from accel_state.device_kinds import WITHOUT_STORAGE, runtime_module
from accel_state.files import any_path
from accel_state.remote import AnyPath, RemotePath


def save(
    obj: Any,
    f: str | os.PathLike[str] | IO[bytes],
    save_on_each_node: bool = False,
    safe_serialization: bool = False,
) -> None:
    """Save an object on the main process. Tensors of lazy devices are saved as CPU tensors.

    With such devices all ranks must call it, since each executes its recorded operations.

    Args:
        obj: The object; with `safe_serialization`, a dictionary from name to tensor.
        f: A path or an fsspec URL, replaced atomically; or an open binary file (not with
            `safe_serialization`).
        save_on_each_node: Save on the first process of every node, for nodes without a shared file system.
        safe_serialization: Write safetensors rather than torch's zip format.

    Raises:
        TypeError: `safe_serialization` is set and `f` is an open file.
    """
    _execute(obj)
    topology = runtime.active.topology
    if not (topology.is_local_main if save_on_each_node else topology.is_main):
        return
    obj = _with_storages(obj)
    if not isinstance(f, (str, os.PathLike)):
        if safe_serialization:
            raise TypeError("safetensors are written to a path, not into an open file: pass the path")
        torch.save(obj, f)
    elif safe_serialization:
        _replace(any_path(f, "f"), partial(_save_file, clean_state_dict_for_safetensors(obj)))
    else:
        _replace(any_path(f, "f"), partial(_save_bin, obj))


def save_state_dict(
    state_dict: Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]],
    folder: str | os.PathLike[str] | RemotePath,
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    safe_serialization: bool = True,
) -> WeightShards:
    """Write a state dict to a folder: one file, or shards and their index.

    Once the new save is complete, files of an earlier save are removed: those of the same format, and those
    of the other format that would be read in place of the new ones.

    Args:
        state_dict: Name to tensor; or parts of it, of which at most one, and one file, are in memory.
        folder: The folder; created if absent.
        max_shard_size: Bytes per file, or text like `"5GB"`.
        safe_serialization: Write safetensors rather than torch's zip format.

    Example:
        >>> import tempfile
        >>> halves = ({name: torch.zeros(4)} for name in "ab")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(save_state_dict(halves, folder, max_shard_size=16).weight_map.items())
        [('a', 'model-00001-of-00002.safetensors'), ('b', 'model-00002-of-00002.safetensors')]
    """
    parts: Iterable[Any] = [state_dict] if isinstance(state_dict, Mapping) else state_dict
    target = any_path(folder, "folder")
    if isinstance(target, Path):
        target.mkdir(parents=True, exist_ok=True)
    limit = convert_file_size_to_int(max_shard_size)
    pattern, index_name = (
        (SAFE_WEIGHTS_PATTERN_NAME, SAFE_WEIGHTS_INDEX_NAME)
        if safe_serialization
        else (WEIGHTS_PATTERN_NAME, WEIGHTS_INDEX_NAME)
    )
    clean = clean_state_dict_for_safetensors if safe_serialization else dict
    write = _save_file if safe_serialization else _save_bin
    shards: list[list[str]] = []
    total = 0
    # 1. Write the shards under temporary names: their names contain the number of files.
    with contextlib.ExitStack() as staged:
        files: list[AnyPath] = []
        for groups, size in fill_shards((group for part in parts for group in groups_of(clean(part))), limit):
            named = {name: tensor for group in groups for name, tensor in group.items()}
            if safe_serialization:
                named = dict(sorted(named.items()))  # as the library does: equal weights are equal files
            tensors = _with_storages(named)
            shards.append([*tensors])
            total += size
            files.append(staged.enter_context(_temporary_file(target / pattern.format(suffix=""))))
            write(tensors, files[-1])
            groups.clear()  # Else they would stay in memory until the next file is full.
            del named, tensors
        # 2. Rename them, now that their number is known, and write the index.
        plan = numbered(shards, total_size=total, pattern=pattern)
        for temporary, file in zip(files, plan.files, strict=True):
            _rename(temporary, target / file)
    if plan.index is not None:
        text = json.dumps(plan.index, indent=2, sort_keys=True) + "\n"
        _replace(target / index_name, lambda file: file.write_bytes(text.encode()))
    # 3. Remove files of an earlier save.
    _remove_previous(target, pattern, index_name, plan)
    return plan


def _with_storages(data: Any) -> Any:
    """Copy the tensors of lazy devices, which cannot be serialised, to the CPU."""
    if "torch_xla" not in sys.modules or not any(_lacks_storage(leaf) for _, leaf in walk(data)):
        return data
    copies: dict[Any, Tensor] = {}  # Tied tensors also share memory in the copy.

    def copy(tensor: Tensor) -> Tensor:
        key = tensor_memory(tensor)
        if key not in copies:
            copies[key] = tensor.detach().cpu().requires_grad_(tensor.requires_grad)
        return copies[key]

    return recursively_apply(copy, data, test_type=_lacks_storage)


def _execute(data: Any) -> None:
    """Execute the operations recorded for tensors of a lazy device, which may include collectives."""
    if "torch_xla" not in sys.modules:  # every other object is torch.save's alone: large lists, cycles
        return
    device = next((leaf.device for _, leaf in walk(data) if _lacks_storage(leaf)), None)
    if device is not None:
        runtime_module(device).flush()


def _lacks_storage(data: Any) -> bool:
    return isinstance(data, torch.Tensor) and data.device.type in WITHOUT_STORAGE


def _remove_previous(folder: AnyPath, pattern: str, index_name: str, plan: WeightShards) -> None:
    """Remove files of an earlier save: of this format, and of the other one if it would be read instead."""
    written = index_name if plan.index is not None else pattern.format(suffix="")
    first = READ_ORDER[: READ_ORDER.index(written)]
    patterns = [pattern, *([SAFE_WEIGHTS_PATTERN_NAME] if SAFE_WEIGHTS_INDEX_NAME in first else ())]
    number = "[0-9]" * 5
    stale = {folder / name for name in (*first, pattern.format(suffix=""), index_name)} - {folder / written}
    for shards in patterns:
        stale.update(folder.glob(shards.format(suffix=f"-{number}-of-{number}")))
    for path in stale - {folder / file for file in plan.files}:
        path.unlink(missing_ok=True)


def _save_file(tensors: Mapping[str, Tensor], path: AnyPath) -> None:
    with _new_file(path) as file:
        write_safetensors(tensors, file)


def _save_bin(obj: Any, path: AnyPath) -> None:
    if isinstance(path, Path):
        torch.save(obj, path)
        return
    with _new_file(path) as file:
        torch.save(obj, file)


def _new_file(path: AnyPath) -> AbstractContextManager[Any]:
    """Open a new file for writing; on an object store it exists once it is complete."""
    return path.open("xb") if isinstance(path, Path) else path.create()


def _rename(source: AnyPath, target: AnyPath) -> None:
    """Rename a file; on an object store, which has no rename, copy it within the store."""
    if isinstance(source, RemotePath):
        source.copy_to(target)
    else:
        source.replace(str(target))


def _replace(path: AnyPath, write: Callable[[AnyPath], object]) -> None:
    """Write a temporary file and rename it: readers see the old file or the new one, mappings stay valid.

    An object store replaces a file when its upload is complete.
    """
    if isinstance(path, RemotePath):
        write(path)
        return
    with _temporary_file(path) as temporary:
        write(temporary)
        _rename(temporary, path)


@contextlib.contextmanager
def _temporary_file(path: AnyPath) -> Generator[AnyPath]:
    """Yield the name of a temporary file, which is removed at the end unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
