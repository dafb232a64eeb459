"""Convert a checkpoint to another format: `convert_checkpoint`."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import xxhash
from torch import Tensor

from accel_convert.deepspeed import UNIVERSAL_TAG_FILE
from accel_convert.read import open_checkpoint
from accel_convert.write import WRITERS, Output
from accel_ops.weights.layout import DEFAULT_SHARD_SIZE, convert_file_size_to_int
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_ops.weights.safetensors_io import as_bytes
from accel_state.errors import CheckpointError, SettingsError, did_you_mean, some_of
from accel_state.files import any_path
from accel_state.frozen import frozen
from accel_state.platforms import trim_heap
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import flush_folder, make_folder, move, remove, sizes_in

DEFAULT_MEMORY = "1GB"
_LEAST_MEMORY = 4_000_000


@frozen
class ConversionReport:
    """The result of a conversion: the tensors read and the files written.

    Attributes:
        source: The checkpoint to read.
        form: Its format, in words.
        num_tensors: The number of tensors to write.
        nbytes: Their bytes.
        target: The folder to write.
        files: The names of its files, with the number and bytes of tensors in each.
        dropped: A phrase for each item of the source that the target lacks.
    """

    source: AnyPath
    form: str
    num_tensors: int
    nbytes: int
    target: AnyPath
    files: dict[str, tuple[int, int]]
    dropped: list[str]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str,
    base: str | os.PathLike[str] | None = None,
    max_memory: int | str = DEFAULT_MEMORY,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    dry_run: bool = False,
) -> ConversionReport:
    """Write a checkpoint in another format, one chunk of a tensor at a time, and verify the result.

    The target appears once all of it is written, and each tensor has been read back and compared.

    Args:
        source: A folder, file or URL of a checkpoint; its format is detected from its files.
        target: A folder, or its URL, that is absent or empty. An upload to a store uses a temporary local
            folder.
        to: `"safetensors"`, `"torch"`, `"full"`, `"sharded"`, `"dcp"` or `"universal"`.
        base: For a LoRA adapter of peft, the checkpoint into whose weights it is merged. For another
            checkpoint of a model of transformers, a folder with its configuration: `"safetensors"` and
            `"torch"` get the names and layouts of the Hub, other formats those in memory, also from
            Megatron-LM.
        max_memory: Maximum bytes of tensors in memory, or text like `"500MB"`. A row of a tensor is never
            split.
        max_shard_size: Maximum bytes of a file of `"safetensors"` or `"torch"`, or text like `"5GB"`.
        dry_run: Whether to write nothing.

    Raises:
        CheckpointError: The source is damaged, of no known format or of another model than `base`, or a
            written tensor differs.
        SettingsError: There is no such format, the target has files, or `base` is missing or has no
            configuration.
        OSError: A file cannot be read or written.
    """
    limit = convert_file_size_to_int(max_memory)
    if limit < _LEAST_MEMORY:
        raise SettingsError(f"max_memory={max_memory!r} is less than 4 MB.")
    if to not in WRITERS:
        raise SettingsError(f"to={to!r}: {did_you_mean(to, WRITERS, f'formats are {some_of(WRITERS)}.')}")
    folder = any_path(target, "target")
    if not isinstance(folder, RemotePath) and folder.exists() and not folder.is_dir():
        raise SettingsError(f"target={str(folder)!r} is a file.")
    if sizes_in(folder):
        raise SettingsError(f"target={str(folder)!r} already contains files. Write to a new folder.")
    contents = open_checkpoint(
        any_path(source, "source"),
        None if base is None else any_path(base, "base"),
        on_hub=to in {"safetensors", "torch"},
    )
    shard_size = convert_file_size_to_int(max_shard_size)
    written, read = _Digests(limit), _Digests(limit)
    with nullcontext() if dry_run else _staging(folder) as staging:
        out = Output(staging, written.chunks)
        WRITERS[to](contents, out, shard_size)
        if staging is not None:
            found = dict(open_checkpoint(staging).tensors())
            for lazy in found.values():
                for _ in read.chunks(lazy):
                    pass
            differing = sorted(
                ".".join(map(str, label[2:]))
                for label in {**out.tensors, **found}
                if (digest := written.of(out.tensors.get(label))) is None
                or digest != read.of(found.get(label))
            )
            if differing:
                raise CheckpointError(
                    f"The written checkpoint differs from the source: {some_of(differing)}."
                )
            flush_folder(staging)
    return ConversionReport(
        source=any_path(source, "source"),
        form=contents.form,
        num_tensors=len(out.tensors),
        nbytes=sum(nbytes for _, nbytes in out.files.values()),
        target=folder,
        files=out.files,
        dropped=[*contents.dropped, *out.dropped],
    )


@contextmanager
def _staging(target: AnyPath) -> Generator[Path]:
    """Yield an empty folder, which becomes the target at the end of the block."""
    if isinstance(target, RemotePath):
        with tempfile.TemporaryDirectory(prefix="accel-convert-") as folder:
            yield Path(folder)
            # Files that mark a checkpoint complete come after its other files.
            last = (layout.MANIFEST_NAME, ".metadata", ".index.json", UNIVERSAL_TAG_FILE)
            for name in sorted(sizes_in(Path(folder)), key=lambda name: (name.endswith(last), name)):
                (target / name).upload(Path(folder) / name)
        return
    make_folder(target.parent)
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    staging.mkdir()
    try:
        yield staging
        move(staging, target)
        flush_folder(target.parent)
    finally:
        remove(staging)


class _Digests:
    """Reads tensors in chunks that fit into the memory of a conversion, and keeps the digest of each.

    A chunk is in memory up to four times: as read, as part of a merge, as serialised, and in a buffer.
    """

    def __init__(self, limit: int) -> None:
        self._chunk_size = limit // 4
        self._since_trimmed = 0
        self._digests: dict[int, object] = {}

    def chunks(self, lazy: LazyTensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the chunks of a tensor, as `LazyTensor.chunks` does."""
        digest = xxhash.xxh3_64()
        for begin, rows in lazy.chunks(self._chunk_size):
            digest.update(as_bytes(rows))
            yield begin, rows
            self._since_trimmed += rows.nbytes
            if self._since_trimmed > self._chunk_size:
                self._since_trimmed = 0
                trim_heap()
        self._digests[id(lazy)] = (digest.hexdigest(), lazy.shape, lazy.dtype)

    def of(self, lazy: LazyTensor | None) -> object:
        """Return the hash of the elements of a tensor with its shape and dtype, if it was read."""
        return self._digests.get(id(lazy))
