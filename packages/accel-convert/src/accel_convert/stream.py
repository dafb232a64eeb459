"""Read and write `torch.distributed.checkpoint` (DCP) folders one chunk of a tensor at a time."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial, reduce
from itertools import chain
from operator import getitem
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from accel_convert.contents import is_lazy
from accel_ops.tree import recursively_apply
from accel_ops.weights.lazy_tensors import LazyTensor, lazy_torch_file
from accel_plugins.sharding.folder import compact, entries
from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath
from accel_state.torch_private import StorageInfo, flatten_state_dict, set_element
from accel_state.unpickling import load_safely

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


def read_lazily(folder: AnyPath, index: Metadata) -> tuple[dict[str, Any], list[str]]:
    """Return the nested state of a DCP folder, with lazy tensors; objects are read with `weights_only=True`.

    Returns:
        The state, and the keys of objects that only code in the folder could build.

    Raises:
        CheckpointError: The index lacks a part of a tensor, or names a form that is not `torch.save`'s.
    """
    state: dict[str, Any] = {}
    refused: list[str] = []
    for entry in entries(index):
        metadata = index.state_dict_metadata[entry.key]
        if isinstance(metadata, TensorStorageMetadata):
            set_element(state, entry.path, _lazy_tensor(folder, index, entry.key, metadata))
            continue
        stored: Any = _storage_of(folder, index, MetadataIndex(entry.key))
        with (folder / str(stored.relative_path)).open("rb") as file:
            file.seek(stored.offset)
            content = io.BytesIO(file.read(stored.length))
        try:
            set_element(state, entry.path, load_safely(content))
        except (pickle.UnpicklingError, RuntimeError, EOFError):
            refused.append(entry.key)
    return state, refused


def _storage_of(folder: AnyPath, index: Metadata, position: MetadataIndex) -> Any:
    stored: Any = (index.storage_data or {}).get(position)
    if stored is None:
        raise CheckpointError(f"The index of {str(folder)!r} lacks a part of {position.fqn!r}.")
    if getattr(stored, "transform_descriptors", None):
        raise CheckpointError(
            f"{str(folder)!r} has {position.fqn!r} compressed by an extension, "
            f"{', '.join(stored.transform_descriptors)}; save it without compression."
        )
    return stored


def _lazy_tensor(folder: AnyPath, index: Metadata, key: str, metadata: TensorStorageMetadata) -> LazyTensor:
    shape, dtype = tuple(metadata.size), metadata.properties.dtype
    parts: list[tuple[tuple[int, ...], tuple[int, ...], Callable[[], LazyTensor]]] = []
    for chunk in metadata.chunks:
        sizes = tuple(chunk.sizes)
        if 0 not in sizes:
            stored = _storage_of(folder, index, MetadataIndex(key, chunk.offsets))
            make = cache(partial(_lazy_chunk, folder, stored, key, sizes, dtype))
            parts.append((tuple(chunk.offsets), sizes, make))
    covered = sum(torch.Size(sizes).numel() for _, sizes, _ in parts)
    if covered != torch.Size(shape).numel():
        raise CheckpointError(
            f"{str(folder)!r} has {covered} elements of {key!r}, which has shape {shape}: files are missing."
        )

    def read(begin: int, end: int) -> Tensor:
        if len(parts) == 1:
            return parts[0][2]().read(begin, end)
        full = torch.empty((end - begin, *shape[1:]), dtype=dtype, device="cpu")
        for offsets, sizes, make in parts:
            first, last = max(begin, offsets[0]), min(end, offsets[0] + sizes[0])
            if first >= last:
                continue
            rows = make().read(first - offsets[0], last - offsets[0])
            if rows.shape == full.shape:
                return rows
            inner = (slice(start, start + size) for start, size in zip(offsets[1:], sizes[1:], strict=True))
            full[(slice(first - begin, last - begin), *inner)] = rows
        return full

    return LazyTensor(shape=shape, dtype=dtype, read=read)


def _lazy_chunk(
    folder: AnyPath, stored: Any, key: str, sizes: tuple[int, ...], dtype: torch.dtype
) -> LazyTensor:
    chunk = lazy_torch_file(folder / str(stored.relative_path), part=(stored.offset, stored.length))
    if not isinstance(chunk, LazyTensor) or (chunk.shape, chunk.dtype) != (sizes, dtype):
        raise CheckpointError(f"{str(folder)!r}: the file of {key!r} is not what its index says.")
    return chunk


Chunks: TypeAlias = Callable[[LazyTensor], Iterator[tuple[int, Tensor]]]
"""Reads a tensor in chunks, as `LazyTensor.chunks` does."""


def write_shards(state: Mapping[str, Any], sink: SupportsWrite[Any], file: str, chunks: Chunks) -> Metadata:
    """Write the one file of shards of a DCP folder, in which each chunk of a tensor is one; return its index.

    Args:
        state: Nested dictionaries and lists with lazy tensors.
        sink: Receives its bytes.
        file: The file's name in the folder.
        chunks: Reads a tensor.
    """
    stored: dict[MetadataIndex, Any] = {}
    position = 0

    def append(content: Any, where: MetadataIndex) -> None:
        nonlocal position
        buffer = io.BytesIO()
        torch.save(content, buffer)
        data = buffer.getbuffer()
        sink.write(data)
        stored[where] = StorageInfo(file, position, len(data))
        position += len(data)

    on_meta = recursively_apply(  # lists without tensors would stay as they are
        lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device="meta"), dict(state), test_type=is_lazy
    )
    flat, paths = flatten_state_dict(on_meta)
    rows: dict[str, Any] = {}
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            rows[key] = BytesStorageMetadata()
            append(value, MetadataIndex(key))
            continue
        lazy: LazyTensor = reduce(getitem, paths[key], cast("Any", state))
        written: list[ChunkStorageMetadata] = []
        nothing = [] if lazy.nbytes else [(0, lazy.full())]
        for begin, part in chain(chunks(lazy), nothing):
            values = part if lazy.shape else part.view(())
            offsets = torch.Size((begin, *[0] * (values.dim() - 1))) if lazy.shape else torch.Size()
            append(compact(values), MetadataIndex(key, offsets, len(written)))
            written.append(ChunkStorageMetadata(offsets=offsets, sizes=values.shape))
        properties = TensorProperties.create_from_tensor(torch.empty(0, dtype=lazy.dtype, device="cpu"))
        rows[key] = TensorStorageMetadata(properties, torch.Size(lazy.shape), written)
    return Metadata(
        state_dict_metadata=rows, planner_data=paths, storage_data=stored, storage_meta=StorageMeta()
    )
