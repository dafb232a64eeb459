"""Write and read folders of `torch.distributed.checkpoint` (DCP) without collectives.

Ranks exchange no plans: the placements of a tensor decide which rank writes it, and one rank merges the
metadata files into the folder's index. The format is that of `torch.distributed.checkpoint.FileSystemWriter`.
"""

from __future__ import annotations

import array as array_module
import gc
import io
import math
import pickle
import zlib
from array import array
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, repeat
from operator import attrgetter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from accel_plugins.sharding.state import ABSENT, INDEX_NAME, local_metadata_file, shard_file
from accel_state.errors import CheckpointError, did_you_mean
from accel_state.frozen import frozen
from accel_state.remote import AnyPath, RemoteFile, RemotePath
from accel_state.torch_private import StorageInfo, flatten_state_dict, set_element
from accel_state.unpickling import load_safely

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class ShardWriter:
    """Write one rank's shards of a state: nested dictionaries and lists of named values.

    All ranks together write every value once; plain tensors and objects are written by the rank `writer`.
    """

    def __init__(self, state: Mapping[str, Any], rank: int, writer: int = 0) -> None:
        is_writer = rank == writer
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(_present(dict(state)), is_coordinator=is_writer)
        items: list[WriteItem] = []
        known: dict[Any, list[WriteItem]] = {}
        for name, value in self._planner.state_dict.items():
            if (kind := _kind(name, value)) not in known:
                plan = create_default_local_save_plan({name: value}, is_writer)
                known[kind] = [item for item in plan.items if _is_written(item, value, is_writer=is_writer)]
            items += [replace(item, index=replace(item.index, fqn=name)) for item in known[kind]]
        self._plan = SavePlan(items, planner_data=self._planner.mappings)
        self._file = shard_file(rank)
        self._results: list[WriteResult] = []

    @property
    def nbytes(self) -> int:
        """Number of bytes of the tensors that this rank writes, without headers."""
        return sum(
            math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
            for item in self._plan.items
            if item.tensor_data is not None
        )

    def local_values(self) -> list[Tensor | bytes]:
        """Return the values that this rank writes: tensors on their devices, objects as bytes."""
        values = (self._planner.resolve_data(item) for item in self._plan.items)
        return [value.getvalue() if isinstance(value, io.BytesIO) else value.detach() for value in values]

    def write_shards(self, values: Sequence[Tensor | bytes], sink: SupportsWrite[Any]) -> None:
        """Write this rank's file of shards, given the result of `local_values` or a copy of it."""
        counting: Any = _CountingSink(sink)
        self._results = []
        for item, value in zip(self._plan.items, values, strict=True):
            begin = counting.size
            if isinstance(value, bytes):
                counting.write(value)
            else:
                torch.save(compact(value.cpu()), counting)
            length = counting.size - begin
            stored = StorageInfo(self._file, begin, length)
            self._results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=stored))

    def write_local_metadata(self, values: object, sink: SupportsWrite[Any]) -> None:
        """Write this rank's metadata file; call it after `write_shards`."""
        del values
        rows: list[tuple[Any, ...]] = []
        numbers = array("q")
        for item, result in zip(self._plan.items, self._results, strict=True):
            data, stored = item.tensor_data, result.storage_data
            chunk = () if data is None else (*data.chunk.offsets, *data.chunk.sizes)
            numbers.extend((*chunk, stored.offset, stored.length))
            rows.append((item.index.fqn, data and data.properties, data and data.size))
        sink.write(local_metadata(rows, self._plan.planner_data, numbers))


def local_metadata(rows: Sequence[tuple[Any, ...]], paths: Any, numbers: array[int]) -> bytes:
    """Return the content of a rank's metadata file.

    A row is the name of a value, and the properties and full shape of a tensor. `numbers` has for each row
    the offsets and sizes of its chunk, and its position and length in the file of shards. All but the
    numbers, which most ranks have alike, is bytes that are compared, and read once.
    """
    return pickle.dumps((zlib.compress(pickle.dumps((rows, paths)), 1), numbers.tobytes()))


class _CountingSink:
    """Sink that counts the bytes written to it."""

    def __init__(self, sink: SupportsWrite[Any]) -> None:
        self._sink = sink
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self._sink.write(data)
        self.size += count
        return count

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it."""


def compact(tensor: Tensor) -> Tensor:
    """Copy a view to its own storage, since `torch.save` writes a view's whole storage."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _present(state: Any) -> Any:
    """Remove `ABSENT` from nested dictionaries; dictionaries that have none are the same objects."""
    if not isinstance(state, dict):
        return state
    items: dict[Any, Any] = state
    local = {key: _present(value) for key, value in items.items() if value is not ABSENT}
    is_same = len(local) == len(items) and all(local[key] is value for key, value in items.items())
    return items if is_same else local


def _is_written(item: WriteItem, value: Any, *, is_writer: bool) -> bool:
    """Return whether this rank writes an item, determined only by the placements of its tensor."""
    if item.type is not WriteItemType.SHARD or not isinstance(value, DTensor) or item.tensor_data is None:
        return is_writer
    coordinate = value.device_mesh.get_coordinate() or ()  # ranks outside of the mesh write nothing
    replicas = [
        index
        for index, placement in zip(coordinate, value.placements, strict=True)
        if placement.is_replicate()  # and no `Shard`, nor `_StridedShard` of FSDP2 on tensor-parallel shards
    ]
    has_any = math.prod(item.tensor_data.chunk.sizes) > 0
    return not any(replicas) and (has_any or (not value.numel() and not any(coordinate)))


def _kind(name: str, value: Any) -> Any:
    """Return what tensors that are planned alike have alike: torch takes milliseconds to place a shard."""
    if not isinstance(value, DTensor):
        return name
    placed = value.device_mesh, value.placements
    return value.shape, value.stride(), value.dtype, value.requires_grad, *placed


class _LoadPlanner(DefaultLoadPlanner):
    """Load plan that unpickles objects with `weights_only=True`."""

    def create_local_plan(self) -> LoadPlan:
        index = cast("Metadata", self.metadata)
        rows: dict[str, Any] = index.state_dict_metadata
        if self.flatten_state_dict and rows.keys() - self.state_dict.keys():
            return super().create_local_plan()  # perhaps the keys of an older torch
        items: list[ReadItem] = []
        known: dict[Any, list[ReadItem]] = {}
        for name, value in self.state_dict.items():
            kind = _kind(name, value), id(getattr(rows.get(name), "chunks", None))
            if kind not in known:
                plan = create_default_local_load_plan({name: value}, index, not self.allow_partial_load)
                known[kind] = plan.items
            for item in known[kind]:
                here, there = (replace(place, fqn=name) for place in (item.dest_index, item.storage_index))
                items.append(replace(item, dest_index=here, storage_index=there))
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        loaded = load_safely(value, map_location=None)
        set_element(self.original_state_dict, self.mappings.get(key, (key,)), loaded)


@contextmanager
def _uncollected() -> Generator[None]:
    """Pause Python's garbage collector, which would visit millions of new objects again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_uncollected()
def write_index(folder: AnyPath, ranks: Iterable[int]) -> list[str]:
    """Merge the metadata files of all ranks into a DCP folder's index; remove them, return their names."""
    metadata_files = {rank: folder / local_metadata_file(rank) for rank in ranks}
    # 1. Read what most ranks have alike once; of the rest, make a table with a row per rank.
    alike: dict[bytes, dict[str, bytes]] = {}
    for rank, file in metadata_files.items():
        shared, numbers = unpickle(file)
        alike.setdefault(shared, {})[shard_file(rank)] = numbers
    values: dict[str, tuple[Any, ...]] = {}
    paths: dict[str, Any] = {}
    for shared in [*alike]:
        rows, own_paths = _IndexUnpickler(io.BytesIO(zlib.decompress(shared))).load()
        paths = {**(own_paths or {}), **paths}
        numbers = alike.pop(shared)
        content = bytearray().join([*numbers.values(), bytes(8)])  # an empty buffer would be an error
        table, begin = torch.frombuffer(content, dtype=torch.int64)[:-1].view(len(numbers), -1), 0
        files = [*numbers]
        for name, properties, size in rows:
            end = begin + 2 * len(size or ()) + 2
            _, _, parts = values.setdefault(name, (properties, size, []))
            parts.append((files, table[:, begin:end]))
            begin = end
    # 2. Write the index; tensors that are sharded alike share the list of their chunks.
    listed: dict[str, Any] = {}
    stored: list[_Call] = []
    known: dict[tuple[Any, ...], Any] = {}
    for name, (properties, size, parts) in values.items():
        table = torch.cat([rows for _, rows in parts])
        files = parts[0][0] if len(parts) == 1 else [file for files, _ in parts for file in files]
        keys, listed[name] = [MetadataIndex(name)], metadata.BytesStorageMetadata()
        if size is not None:
            key = size, table[:, :-2].numpy().tobytes()
            if key not in known:
                known[key] = _chunks(size, table)
            if known[key] is None:
                raise CheckpointError(
                    f"The shards that the ranks wrote to {str(folder)!r} do not add up to a full {name!r}. "
                    "Prepare the same objects on every rank."
                )
            first, offsets, chunks = known[key]
            if len(first) < len(table):
                table, files = table[first], [files[number] for number in first]
            keys = _Call(map, MetadataIndex, _Call(repeat, name), offsets)
            listed[name] = TensorStorageMetadata(properties, size, chunks)
        columns = [array("q", column) for column in table[:, -2:].T.tolist()]
        stored.append(_Call(zip, keys, _Call(map, StorageInfo, files, *columns)))
    storage_data: Any = _Call(dict, _Call(chain, *stored))
    index = Metadata(listed, paths, storage_data, metadata.StorageMeta())
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    for file in metadata_files.values():
        file.unlink()
    return [file.name for file in metadata_files.values()]


def _is_full(size: torch.Size, table: Tensor) -> bool:
    """Return whether chunks, a row each, fill a tensor as cells of a grid: so do shards of `DTensor`s."""
    cells, count = torch.zeros(len(table), dtype=torch.int64), 1
    for dim, length in enumerate(size):
        begins, position = table[:, dim].unique(return_inverse=True)
        ends = torch.cat([begins[1:], torch.tensor([length])])
        if begins[0] or not torch.equal((ends - begins)[position], table[:, len(size) + dim]):
            return False
        cells, count = cells * len(begins) + position, count * len(begins)
    return len(cells.unique()) == count


def _chunks(size: torch.Size, table: Tensor) -> tuple[list[int], Any, Any] | None:
    """Return the rows of a tensor's chunks, the lists of their offsets, and of the chunks; `None` for a hole.

    Ranks that have the same shard, such as experts beside tensor parallelism, wrote it each: one is listed.
    """
    rows = {offsets: number for number, offsets in enumerate(map(tuple, table[:, : len(size)].tolist()))}
    first = [*rows.values()]
    if size and 0 not in size and not _is_full(size, table[first]):
        return None
    columns = [array("q", column) for column in table[first].T.tolist()]
    offsets, sizes = (
        _Call(list, _Call(map, torch.Size, _Call(zip, *some) if size else [()]))
        for some in (columns[: len(size)], columns[len(size) : -2])
    )
    return first, offsets, _Call(list, _Call(map, metadata.ChunkStorageMetadata, offsets, sizes))


class _Call:
    """Pickled as a call, so that who unpickles it gets the result.

    An index has an entry per shard and tensor, perhaps millions. Columns of integers, and calls that make
    DCP's objects of them, are written and read in a fraction of the time, by DCP too.
    """

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._called = function, arguments

    def __reduce__(self) -> Any:
        return self._called


def read_into(
    folder: AnyPath,
    state: dict[str, Any],
    index: Metadata | None = None,
    *,
    strict: bool = True,
    flat: bool = False,
) -> None:
    """Read this rank's shards of a state, nested as it was saved, in place; replace what is no tensor.

    Unless `strict`, values that the folder lacks are unchanged. If `flat`, the keys of `state` are those of
    the folder's index, which is read if it was not before: it grows with the number of ranks that saved.

    Raises:
        CheckpointError: The folder is damaged, or does not fit `state`.
    """
    index = index or read_index(folder)
    present = {entry.key: entry for entry in entries(index)}
    own = _present(state)
    for key, value in (own if flat else flatten_state_dict(own)[0]).items():
        entry = present.get(key)
        if entry is None:
            if strict:
                hint = did_you_mean(key, present, f"it has {len(present)} others.")
                raise CheckpointError(f"{str(folder)!r} has no {key!r}; {hint}")
        elif isinstance(value, torch.Tensor) and entry.shape is not None and value.shape != entry.shape:
            raise CheckpointError(
                f"{str(folder)!r} has {key!r} with shape {tuple(entry.shape)}, but this run's has shape "
                f"{tuple(value.shape)}: build the model as in the run that was saved."
            )
    try:
        reader: Any = FileSystemReader(folder if isinstance(folder, Path) else ".")
        planner = _LoadPlanner(flatten_state_dict=not flat, allow_partial_load=not strict)
        planner.set_up_planner(own, index, is_coordinator=False)
        plan = planner.create_local_plan()
        planner.original_state_dict = state
        if isinstance(folder, RemotePath):
            reader.fs, reader.path = _StoreFiles(), folder
            # In file order, so that each block is fetched once.
            stored: Any = index.storage_data or {}
            place = attrgetter("relative_path", "offset")
            items = sorted(plan.items, key=lambda item: place(stored[item.storage_index]))
            plan = replace(plan, items=items)
        reader.set_up_storage_reader(index, is_coordinator=False)
        reader.read_data(reader.prepare_local_plan(plan), planner).wait()
    except (OSError, *DAMAGE) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{str(folder)!r} cannot be read: {reason}.") from error


class _StoreFiles:
    """The file system methods that `FileSystemReader` needs, for an object store."""

    def create_stream(self, path: RemotePath, mode: str) -> RemoteFile:
        del mode  # always "rb"
        return RemoteFile(path)

    def concat_path(self, path: RemotePath, suffix: str) -> RemotePath:
        return path / suffix


def read_all(
    folder: AnyPath, allocate: Callable[[TensorMetadata], Any], index: Metadata | None = None
) -> dict[str, Any]:
    """Read every value of a DCP folder into nested dictionaries and lists, as they were saved.

    `allocate` returns the destination tensor of an entry with a shape, or `ABSENT` to skip the entry.
    """
    state: dict[str, Any] = {}
    index = index or read_index(folder)
    for entry in entries(index):
        set_element(state, entry.path, None if entry.shape is None else allocate(entry))
    read_into(folder, state, index)
    return state


@frozen
class TensorMetadata:
    """One value of a DCP folder; without a shape, it is an object, not a tensor.

    `path` has the keys of nested dictionaries, and indices of lists, that lead to it.
    """

    key: str
    path: tuple[str | int, ...]
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


@_uncollected()
def read_index(folder: AnyPath) -> Metadata:
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
        # A rank has one file, and as many entries as tensors.
        names = [PurePath(name) for name in {stored.relative_path for stored in storage_data.values()}]
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} is not the index of a sharded state: {error}.") from error
    for name in names:
        if name.is_absolute() or ".." in name.parts:
            raise CheckpointError(f"{str(path)!r} names {str(name)!r}, which is not in its folder.")
    return index


def entries(index: Metadata) -> list[TensorMetadata]:
    """List the values of an index."""
    paths: Mapping[str, tuple[str | int, ...]] = index.planner_data or {}
    listed: list[TensorMetadata] = []
    for key, row in index.state_dict_metadata.items():
        entry = TensorMetadata(key=key, path=paths.get(key, (key,)))
        if isinstance(row, TensorStorageMetadata):
            entry = replace(entry, shape=row.size, dtype=row.properties.dtype)
        listed.append(entry)
    return listed


def unpickle(path: AnyPath) -> Any:
    """Unpickle an index or a rank's metadata file, if it has objects of allowed classes only."""
    try:
        with path.open("rb") as file:
            return _IndexUnpickler(file).load()
    except DAMAGE as error:
        raise CheckpointError(f"{str(path)!r} is not the index of a sharded state: {error}.") from error


_ALLOWED_NAMES = {
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
    # Plans that Megatron keeps in its index.
    planner: ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
}


_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (module.__name__, name): getattr(module, name)
        for module, names in _ALLOWED_NAMES.items()
        for name in names
    },
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    **{
        (module, name): PurePath
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
    },
    **{("builtins", kind.__name__): kind for kind in (dict, list, map, set, zip)},
    **{("itertools", kind.__name__): kind for kind in (chain, repeat)},
    **{("array", name): getattr(array_module, name) for name in ("array", "_array_reconstructor")},
    ("collections", "OrderedDict"): dict,
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): Metadata,  # before 0.16
}
"""The objects that an index may refer to, besides torch's dtypes, by module and name."""


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles plain values and what is allowed; `weights_only` reads files of `torch.save` only."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        dtype = getattr(torch, global_name, None) if module_name == "torch" else None
        allowed = dtype if isinstance(dtype, torch.dtype) else _ALLOWED.get((module_name, global_name))
        if allowed is None:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in this file")
        return allowed


DAMAGE = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,  # a length beyond the file; CPython prints a SystemError if it is a bytearray's
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)
"""Raised by pickle and torch for damaged bytes, and for pickles that would run code."""
