"""Write, hash and read the files of a checkpoint; flush folders to disk."""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from accel_state.platforms import create_file, flush_file
from accel_state.remote import BLOCK_BYTES, READS, AnyPath, RemotePath
from accel_train.checkpoint.layout import FileRecord, Manifest


def write_file(path: Path, write: Callable[[Any], object], *, to_disk: bool) -> FileRecord:
    """Write a file, which replaces one: `write` is called with the writer; return its size and checksum."""
    with FileWriter(path) as file:
        try:
            sink = io.BufferedWriter(file, _CHUNK)
            write(sink)
            sink.flush()
        except Exception as error:
            if file.failure is not None:  # torch raises an error of its own, without the reason
                raise OSError(*file.failure) from error
            raise
    if to_disk:
        flush_file(path)
    return FileRecord(size=file.size, checksum=file.digest.hexdigest())


_CHUNK = 1 << 20  # bytes that are hashed, then written: small enough to be still in the cache


class FileWriter(io.RawIOBase):
    """A new file that is hashed while it is written.

    Attributes:
        failure: The number and text of the error that `write` has raised, if any.
    """

    failure: tuple[int | None, str | None] | None = None
    size = 0

    def __init__(self, path: Path) -> None:
        self.digest = xxhash.xxh3_64()
        path.unlink(missing_ok=True)  # not truncated: it may be a link, such as one that a hook has made
        self._descriptor = create_file(path)

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        """Hash and write the first of some bytes; return their number."""
        try:
            count = os.write(self._descriptor, data[:_CHUNK])
        except OSError as error:
            self.failure = error.errno, error.strerror
            raise
        self.digest.update(data[:count])
        self.size += count
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._descriptor)


_REMOTE_CHUNK = READS * BLOCK_BYTES


def record_of(path: AnyPath, *, to_disk: bool = False) -> FileRecord:
    """Read a file and hash it."""
    digest, size = xxhash.xxh3_64(), 0
    buffer = memoryview(bytearray(_REMOTE_CHUNK if isinstance(path, RemotePath) else _CHUNK))
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    if to_disk and isinstance(path, Path):
        flush_file(path)
    return FileRecord(size=size, checksum=digest.hexdigest())


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


def complaints_about(folder: AnyPath, manifest: Manifest) -> list[str]:
    """Return one phrase for each file of a checkpoint that is absent or has another size."""
    # A store lists all files in one request, but perhaps late: it is asked for those that differ.
    listed = folder.sizes() if isinstance(folder, RemotePath) else {}
    differing = [name for name, row in manifest.files.items() if listed.get(name) != row.size]

    def complaint(name: str) -> str:
        path, expected = folder / name, manifest.files[name].size
        try:
            size = path.size() if isinstance(path, RemotePath) else path.stat().st_size
        except FileNotFoundError:
            return f"{name!r} is absent"
        return "" if size == expected else f"{name!r} has {size} bytes, not {expected}"

    with ThreadPoolExecutor(REQUESTS, "accel-sizes") as threads:
        return [phrase for phrase in threads.map(complaint, differing) if phrase]


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
