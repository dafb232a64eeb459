"""Write, hash and read the files of a checkpoint; flush folders to disk."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from accel_state.files import libc
from accel_state.remote import BLOCK_BYTES, READS, AnyPath, RemoteFile, RemotePath
from accel_train.checkpoint.layout import FileRecord

if TYPE_CHECKING:
    from accel_ops.weights.safetensors_io import SafetensorsFile


def write_file(path: Path, write: Callable[[Any], object], *, to_disk: bool) -> FileRecord:
    """Write a file: `write` is called with the writer; return its size and checksum. It replaces one."""
    writer = FileWriter(path, to_disk=to_disk)
    try:
        write(writer)
    except BaseException as error:
        writer.abandon()
        failure, writer.failure = writer.failure, None
        try:
            # torch raises an error of its own, without the reason.
            if failure is not None and failure is not error:
                raise failure from error
        finally:
            del failure  # else a cycle: its traceback holds this frame
        raise
    return writer.finish()


_CHUNK = 1 << 20  # bytes that are hashed, then written: small enough to be still in the cache
_STRETCH = 64 << 20  # bytes after which the system is asked to write them out, not all of them at the end
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


class FileWriter:
    """A new file that is hashed while it is written.

    Args:
        to_disk: Whether `finish` returns only when the contents are on disk.

    Attributes:
        failure: The error that `write` has raised, if any.
    """

    __slots__ = ("_begun", "_hash", "_pending", "_size", "_to_disk", "descriptor", "failure")

    def __init__(self, path: Path, *, to_disk: bool) -> None:
        self._to_disk = to_disk
        self._begun = 0  # bytes that the system was asked to write out
        path.unlink(missing_ok=True)  # not truncated: it may be a link, such as one that a hook has made
        binary = getattr(os, "O_BINARY", 0)  # without it, Windows writes two bytes for a line feed
        self.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | binary, 0o666)
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
            library = libc()  # start writing to disk: pages stay cached, and `fsync` reports failures
            if library is not None:
                offset, count = ctypes.c_int64(self._begun), ctypes.c_int64(self._size - self._begun)
                library.sync_file_range(self.descriptor, offset, count, _SYNC_FILE_RANGE_WRITE)
            self._begun = self._size


_REMOTE_CHUNK = READS * BLOCK_BYTES


def record_of(path: AnyPath, *, to_disk: bool = False) -> FileRecord:
    """Read a file and hash it."""
    digest, size = xxhash.xxh3_64(), 0
    if isinstance(path, RemotePath):
        with RemoteFile(path) as remote:
            buffer = memoryview(bytearray(min(_REMOTE_CHUNK, remote.size)))
            while count := remote.readinto(buffer):
                digest.update(buffer[:count])
                size += count
        return FileRecord(size=size, checksum=digest.hexdigest())
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    if to_disk:
        _flush_file(path)
    return FileRecord(size=size, checksum=digest.hexdigest())


_FLUSHED_AS = "r+b" if os.name == "nt" else "rb"  # Windows flushes no file that is open only for reading


def _flush_file(path: Path) -> None:
    with path.open(_FLUSHED_AS, buffering=0) as file:
        os.fsync(file.fileno())


_MAPPED_CHUNK = 16 << 20  # bytes of a mapping that are in memory at once; a multiple of any page


def record_of_mapping(file: SafetensorsFile) -> FileRecord:
    """Hash a file through its mapping, which its tensors share, releasing what was hashed."""
    digest = xxhash.xxh3_64()
    contents = file.contents()
    for begin in range(0, len(contents), _MAPPED_CHUNK):
        file.read_ahead_bytes(begin, begin + _MAPPED_CHUNK)
        digest.update(contents[begin : begin + _MAPPED_CHUNK])
        file.evict_bytes(begin, begin + _MAPPED_CHUNK)
    return FileRecord(size=len(contents), checksum=digest.hexdigest())


_STRIPE = 1 << 19  # bytes that are read, then hashed: small enough to be still in the cache
_LONG = 1 << 21  # bytes of a read in which another thread takes part


class HashedReader(io.RawIOBase):
    """A file that is hashed while it is read.

    Bytes that are read in the order of the file are hashed when they are in memory; `finish` reads those that
    were skipped. A second thread takes part in a long read: each reads the next stripe, or hashes the stripes
    that are in memory while the other one reads.

    Args:
        path: The file.
        positioned: Whether to read with `preadv`, which a second thread needs; Windows has none.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder) / "file"
        ...     _ = path.write_bytes(b"0123456789")
        ...     with HashedReader(path) as file:
        ...         _ = file.seek(4)
        ...         file.read(2), file.finish().size
        (b'45', 10)
    """

    def __init__(self, path: AnyPath, *, positioned: bool = hasattr(os, "preadv")) -> None:
        self._positioned = positioned
        self._resources = ExitStack()
        self._helper: ThreadPoolExecutor | None = None
        if isinstance(path, RemotePath):
            self._file: RemoteFile | FileIO = self._resources.enter_context(RemoteFile(path))
            self._size = self._file.size
        else:
            self._file = self._resources.enter_context(path.open("rb", buffering=0))
            self._size = os.fstat(self._file.fileno()).st_size
        self._position = 0
        self._hash = xxhash.xxh3_64()
        self._hashed = 0  # bytes from the beginning on
        self._hashing = threading.Lock()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        begin = self._position
        view = memoryview(buffer).cast("B")[: max(0, self._size - begin)]
        if 0 < begin - self._hashed <= _STRIPE:
            self._hash_up_to(min(begin, self._size))
        if len(view) > _STRIPE and not isinstance(self._file, RemoteFile):
            unread, in_memory = deque(range(0, len(view), _STRIPE)), set[int]()
            read = partial(self._read_and_hash, view, begin, unread, in_memory)
            is_shared = self._positioned and len(view) >= _LONG
            if is_shared and self._helper is None:
                self._helper = self._resources.enter_context(ThreadPoolExecutor(1, "accel-read"))
            second = self._helper.submit(read) if is_shared and self._helper is not None else None
            try:
                read()
            finally:  # the owner of the memory may free it when this returns
                unread.clear()
                if second is not None:
                    second.result()
        else:
            self._read_at(view, begin)
        self._hash_from(view, begin)
        self._position += len(view)
        return len(view)

    def finish(self) -> FileRecord:
        """Hash what was not read; return the size and the checksum of the file.

        Raises:
            OSError: The file cannot be read.
        """
        self._hash_up_to(self._size)
        return FileRecord(size=self._hashed, checksum=self._hash.hexdigest())

    def close(self) -> None:
        self._resources.close()
        super().close()

    def _read_and_hash(self, view: memoryview, begin: int, unread: deque[int], in_memory: set[int]) -> None:
        """Read stripes until none is left; hash those in memory, unless the other thread is hashing."""
        while True:
            try:
                start = unread.popleft()
            except IndexError:
                return
            self._read_at(view[start : start + _STRIPE], begin + start)
            in_memory.add(start)
            if self._hashing.acquire(blocking=False):
                try:
                    while (start := self._hashed - begin) in in_memory:
                        self._hash_from(view[: start + _STRIPE], begin)
                finally:
                    self._hashing.release()

    def _hash_from(self, view: memoryview, begin: int) -> None:
        """Hash the bytes of a view that follow those hashed before; the view begins at a file position."""
        if begin <= self._hashed < begin + len(view):
            self._hash.update(view[self._hashed - begin :])
            self._hashed = begin + len(view)

    def _hash_up_to(self, end: int) -> None:
        buffer = memoryview(bytearray(min(_STRIPE, max(0, end - self._hashed))))
        while self._hashed < end:
            part = buffer[: end - self._hashed]
            self._read_at(part, self._hashed)
            self._hash_from(part, self._hashed)

    def _read_at(self, view: memoryview, position: int) -> None:
        """Fill a view with the bytes at a position of the file."""
        if isinstance(self._file, RemoteFile):  # it reads large views with several threads
            self._file.read_at(view, position)
            return
        done = 0
        while done < len(view):
            if self._positioned:
                count = os.preadv(self._file.fileno(), [view[done:]], position + done)
            else:
                self._file.seek(position + done)
                count = self._file.readinto(view[done:])
            if not count:
                size = os.fstat(self._file.fileno()).st_size  # another thread may be behind
                raise OSError(f"{self._file.name!r} ends at byte {size}, not {self._size}")
            done += count


class HashedBytes(io.BytesIO):
    """A small file, read into memory and hashed at once."""

    def __init__(self, path: AnyPath) -> None:
        content = path.read_bytes()
        super().__init__(content)
        self._record = FileRecord(size=len(content), checksum=xxhash.xxh3_64(content).hexdigest())

    def finish(self) -> FileRecord:
        """Return the size and the checksum of the file."""
        return self._record


def sizes_in(folder: AnyPath) -> dict[str, int]:
    """Return the size of every file below a folder, by path with `/` between folders."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


REQUESTS = 8  # to an object store at the same time


def sizes_of(folder: AnyPath, names: Collection[str]) -> dict[str, int]:
    """Return the sizes of those of some files that exist: each is asked for, since a listing may be late."""

    def size_of(name: str) -> int | None:
        path = folder / name
        try:
            return path.size() if isinstance(path, RemotePath) else path.stat().st_size
        except FileNotFoundError:
            return None

    with ThreadPoolExecutor(REQUESTS, "accel-sizes") as threads:
        sizes = zip(names, threads.map(size_of, names), strict=True)
    return {name: size for name, size in sizes if size is not None}


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


def make_folder(folder: AnyPath) -> None:
    """Make a folder with its parents, if absent; object stores have none."""
    if isinstance(folder, RemotePath):
        return
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
