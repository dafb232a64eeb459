"""Files that are hashed while they are written, and flushed folders."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

import xxhash

from accel_state.libc import libc
from accel_train.checkpoint.manifest import FileRecord

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from accel_ops.weights.safetensors_file import SafetensorsFile

_CHUNK = 1 << 20  # bytes that are hashed, then written: small enough to be still in the cache
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_STRETCH = 64 << 20  # bytes after which the system is asked to write them out, rather than all at the end


class FileWriter:
    """A new file: hashed while it is written.

    Args:
        to_disk: Whether `finish` is to return only when the contents are on disk.

    Attributes:
        failure: The error that `write` has raised, if any.
    """

    __slots__ = ("_begun", "_hash", "_pending", "_size", "_to_disk", "descriptor", "failure")

    def __init__(self, path: Path, *, to_disk: bool) -> None:
        self._to_disk = to_disk
        self._begun = 0  # bytes that the system has begun to write out
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._hash = xxhash.xxh3_64()
        self._pending = bytearray()
        self._size = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Append bytes; small ones are buffered."""
        view = memoryview(data).cast("B")
        if len(self._pending) + len(view) < _CHUNK:
            self._pending += view
        else:
            self.flush()
            for begin in range(0, len(view), _CHUNK):
                self._write_out(view[begin : begin + _CHUNK])
        return len(view)

    def flush(self) -> None:
        """Write the buffer to the operating system."""
        if self._pending:
            pending, self._pending = self._pending, bytearray()
            self._write_out(memoryview(pending))

    def finish(self) -> FileRecord:
        """Close the file."""
        try:
            self.flush()
            if self._to_disk:
                os.fsync(self.descriptor)
        finally:
            os.close(self.descriptor)
        return FileRecord(size=self._size, checksum=self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file without completing it."""
        os.close(self.descriptor)

    def _write_out(self, view: memoryview) -> None:
        self._hash.update(view)
        self._size += len(view)
        try:
            while view:
                view = view[os.write(self.descriptor, view) :]
        except OSError as error:
            self.failure = error
            raise
        if self._to_disk and self._size - self._begun >= _STRETCH:
            _begin_to_write_out(self.descriptor, self._begun, self._size - self._begun)
            self._begun = self._size


def _begin_to_write_out(descriptor: int, begin: int, length: int) -> None:
    """Begin to write a part of a file to the disk, without waiting for it; the pages stay in the cache.

    A failure is left to `fsync`, which waits for everything.
    """
    library = libc()
    if library is not None:
        offset, count = ctypes.c_int64(begin), ctypes.c_int64(length)
        library.sync_file_range(descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)


def write_file(path: Path, write: Callable[[FileWriter], object], *, to_disk: bool) -> FileRecord:
    """Write a new file with a function, which gets what to write to."""
    writer = FileWriter(path, to_disk=to_disk)
    try:
        write(writer)
    except BaseException as error:
        writer.abandon()
        if writer.failure is not None:  # torch's own error hides it
            raise writer.failure from error
        raise
    return writer.finish()


def record_of(path: Path, *, to_disk: bool = False) -> FileRecord:
    """Read a file and hash it."""
    digest, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
        if to_disk:
            os.fsync(file.fileno())
    return FileRecord(size=size, checksum=digest.hexdigest())


def record_of_mapping(file: SafetensorsFile) -> FileRecord:
    """Hash a file in the pages through which its tensors are read."""
    contents = file.contents()
    file.read_ahead(file.entries)
    return FileRecord(size=len(contents), checksum=xxhash.xxh3_64(contents).hexdigest())


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the size of every file below a folder, by path with `/` between folders."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, where the system supports that."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:  # some network file systems
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder with its parents, if absent."""
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - through `os`, like all that changes the disk here


def move(source: Path, target: Path) -> None:
    """Rename, replacing a file or an empty folder."""
    os.replace(source, target)  # noqa: PTH105 - as above


def remove(path: Path) -> None:
    """Delete a file or a folder tree, if present."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
