"""Read a file and hash it in one pass."""

from __future__ import annotations

import io
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import xxhash

from accel_train.checkpoint.manifest import FileRecord

if TYPE_CHECKING:
    from pathlib import Path

_STRIPE = 1 << 19  # bytes that are read, then hashed: small enough to be still in the cache
_LONG = 1 << 21  # bytes of a read in which another thread takes part
_CAN_READ_AT = hasattr(os, "preadv")  # not on Windows


class HashedReader(io.RawIOBase):
    """A file that is hashed while it is read.

    What is read in the order of the file is hashed when it is in memory; `finish` reads again what was passed
    over. In a long read a second thread takes part: either thread reads the next stripe, or hashes those that
    are there while the other one reads.

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

    def __init__(self, path: Path) -> None:
        self._resources = ExitStack()
        self._helper: ThreadPoolExecutor | None = None
        self._file = self._resources.enter_context(path.open("rb", buffering=0))
        self._size = os.fstat(self._file.fileno()).st_size
        self._position = 0
        self._hash = xxhash.xxh3_64()
        self._hashed = 0  # bytes from the beginning on
        self._hashing = threading.Lock()

    def readable(self) -> bool:
        """Return `True`."""
        return True

    def seekable(self) -> bool:
        """Return `True`."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Set the position of the next read, counted from the beginning, from itself, or from the end."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer, up to the end of the file; return the number of bytes."""
        begin = self._position
        view = memoryview(buffer).cast("B")[: max(0, self._size - begin)]
        if 0 < begin - self._hashed <= _STRIPE:
            self._hash_up_to(min(begin, self._size))
        if len(view) > _STRIPE:
            self._read_stripes(view, begin)
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
        """Close the file."""
        self._resources.close()
        super().close()

    def _read_stripes(self, view: memoryview, begin: int) -> None:
        unread, there = deque(range(0, len(view), _STRIPE)), set[int]()
        read = partial(self._read_and_hash, view, begin, unread, there)
        is_shared = _CAN_READ_AT and len(view) >= _LONG
        helping = self._pool().submit(read) if is_shared else None
        try:
            read()
        finally:  # whoever owns the memory may take it back when this returns
            unread.clear()
            if helping is not None:
                helping.result()

    def _read_and_hash(self, view: memoryview, begin: int, unread: deque[int], there: set[int]) -> None:
        """Read stripes until none is left; hash those that are there, unless the other thread does."""
        while (at := _next(unread)) is not None:
            self._read_at(view[at : at + _STRIPE], begin + at)
            there.add(at)
            if self._hashing.acquire(blocking=False):
                try:
                    while (at := self._hashed - begin) in there:
                        self._hash_from(view[: at + _STRIPE], begin)
                finally:
                    self._hashing.release()

    def _pool(self) -> ThreadPoolExecutor:
        if self._helper is None:
            self._helper = self._resources.enter_context(ThreadPoolExecutor(1, "accel-read"))
        return self._helper

    def _hash_from(self, view: memoryview, begin: int) -> None:
        """Hash what is new of a view, which begins at a position in the file."""
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
        """Fill a view."""
        done = 0
        while done < len(view):
            if _CAN_READ_AT:
                count = os.preadv(self._file.fileno(), [view[done:]], position + done)
            else:
                self._file.seek(position + done)
                count = self._file.readinto(view[done:])
            if not count:
                size = os.fstat(self._file.fileno()).st_size  # another thread may be behind
                raise OSError(f"{self._file.name!r} ends at byte {size}, not {self._size}")
            done += count


class HashedBytes(io.BytesIO):
    """A file that is read and hashed at once: small ones, whose many small parts cost less in memory."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        super().__init__(content)
        self._record = FileRecord(size=len(content), checksum=xxhash.xxh3_64(content).hexdigest())

    def finish(self) -> FileRecord:
        """Return the size and the checksum of the file."""
        return self._record


def _next(unread: deque[int]) -> int | None:
    """Take the first one, if another thread has left one."""
    try:
        return unread.popleft()
    except IndexError:
        return None
