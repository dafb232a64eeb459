"""Files on object stores, through fsspec: `RemotePath`, a subset of `pathlib.Path`; multipart uploads.

An object store has no folders, no rename and no locks, and may list new files late. A file exists, with all
of its bytes, once its upload is completed. A request that fails is logged and retried a few times.
"""

from __future__ import annotations

import abc
import errno
import io
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from accel_state.errors import MissingDependencyError, SettingsError, first_line

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""Attempts per request, in addition to the retries of the back end."""
PAUSE_S = 0.5
"""Seconds before the second attempt; three times as long before each further one."""
PART_BYTES = 16 << 20
"""Bytes per part of an upload."""
UPLOADS = 4
"""Concurrent part uploads of a file, where the store accepts parts in any order."""
FIRST_BYTES = 256 << 10
"""Bytes of the block fetched for a smaller read; doubled for each sequential read, up to eight times."""
BLOCK_BYTES = 8 << 20
"""Bytes per request: a larger read takes several blocks."""
READS = 8
"""Concurrent block reads of a file."""

_Result = TypeVar("_Result")
# Errors that are not retried; for absent files, the class gives the error number.
_NUMBERS: dict[type[Exception], int] = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    ValueError: errno.EINVAL,
    TypeError: errno.EINVAL,
}


def repeated(request: Callable[[], _Result], what: str, url: str) -> _Result:
    """Send a request, retry it if it fails, and return its result.

    Args:
        request: Must be safe to repeat.
        what: The request, as the subject of a sentence, for the log.
        url: The file or folder of the request, for the log.

    Raises:
        OSError: Every attempt failed, or one failed with an error that is not retried, such as
            `FileNotFoundError` and `PermissionError`.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return request()
        except tuple(_NUMBERS) as error:
            number = next(number for kind, number in _NUMBERS.items() if isinstance(error, kind))
            raise OSError(number, first_line(error), url) from error
        except Exception as error:
            if attempt == ATTEMPTS:
                number = getattr(error, "errno", None) or errno.EIO
                raise OSError(number, f"{first_line(error)} (after {ATTEMPTS} attempts)", url) from error
            pause = PAUSE_S * 3 ** (attempt - 1)
            logger.warning(
                "%s: %s failed (%s); attempt %d of %d follows in %g s.",
                *(url, what, first_line(error), attempt + 1, ATTEMPTS, pause),
            )
            time.sleep(pause)
    raise AssertionError


class RemotePath:
    """A file or folder of an object store, by its fsspec URL.

    Args:
        url: Such as `"s3://bucket/run"`; `accel_state.files.any_path` checks it.

    Example:
        >>> path = RemotePath("memory://bucket/run/") / "model.bin"
        >>> str(path), path.name, path.suffix, str(path.parent)
        ('memory://bucket/run/model.bin', 'model.bin', '.bin', 'memory://bucket/run')
    """

    __slots__ = ("_url",)

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The file extension, with its dot."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        """The folder that contains it."""
        return RemotePath(self._url.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        """Return the path of a sibling."""
        return self.parent / name

    def exists(self) -> bool:
        """Return whether the file, or a file below it, exists."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Return whether the file exists."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether a file below it exists."""
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        """Return `False`: stores have no links."""
        return False

    def size(self) -> int:
        """Return the size of the file in bytes.

        Raises:
            OSError: It is absent, or cannot be reached.
        """
        return int(self._info()["size"])

    def version(self) -> int:
        """Return a number that changes when the file is replaced.

        Raises:
            OSError: It is absent, or cannot be reached.
        """
        return int(self._request("a request for its version", lambda fs, path: fs.checksum(path)))

    def iterdir(self) -> Iterator[RemotePath]:
        """Return the files and folders in the folder.

        Raises:
            OSError: It is absent, or cannot be listed.
        """
        _, path = self.file_system()
        rows: list[str] = self._request("its listing", lambda fs, path: fs.ls(path, detail=False))
        own = path.strip("/")
        return iter([self / row.rstrip("/").rpartition("/")[2] for row in rows if row.strip("/") != own])

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return the files and folders in the folder whose names match a pattern."""
        return [entry for entry in self.iterdir() if PurePosixPath(entry.name).match(pattern)]

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below the folder, by path with `/` between folders.

        Raises:
            OSError: It cannot be listed. An absent folder has no files.
        """
        _, path = self.file_system()
        begin = len(path.strip("/")) + 1
        try:
            rows: dict[str, dict[str, Any]] = self._request(
                "its listing", lambda fs, path: fs.find(path, detail=True)
            )
        except FileNotFoundError:
            return {}
        files = {name.strip("/")[begin:]: int(row["size"]) for name, row in rows.items()}
        return {name: size for name, size in sorted(files.items()) if name}

    def read_bytes(self) -> bytes:
        """Return the contents of the file.

        Raises:
            OSError: It is absent, or cannot be read.
        """
        return self._request("reading", lambda fs, path: fs.cat_file(path))

    def read_text(self) -> str:
        """Return the contents of the file as text."""
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write a small file at once.

        Raises:
            OSError: It cannot be written.
        """
        self._request("writing", lambda fs, path: fs.pipe_file(path, content))

    def open(self) -> RemoteFile:
        """Open the file for reading.

        Raises:
            OSError: It is absent, or cannot be reached.
        """
        return RemoteFile(self)

    def copy_to(self, target: AnyPath) -> None:
        """Copy the file to another path of its store; the bytes stay in the store.

        Raises:
            OSError: It is absent, or cannot be copied.
        """
        _, to = RemotePath(str(target)).file_system()
        self._request("copying", lambda fs, path: fs.cp_file(path, to))

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        try:
            self._request("deleting", lambda fs, path: fs.rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all files below the folder, if there are any.

        Raises:
            OSError: They cannot be deleted.
        """
        try:
            self._request("deleting", lambda fs, path: fs.rm(path, recursive=True))
        except FileNotFoundError:
            return

    def file_system(self) -> tuple[Any, str]:
        """Return fsspec's file system, which it caches, and the path in it."""
        fs, path = import_module("fsspec").url_to_fs(self._url)
        return fs, path

    def _kind(self) -> str | None:
        try:
            return self._info()["type"]
        except FileNotFoundError:
            return None

    def _info(self) -> dict[str, Any]:
        return self._request("a request for its size", lambda fs, path: fs.info(path))

    def _request(self, what: str, request: Callable[[Any, str], _Result]) -> _Result:
        fs, path = self.file_system()

        def send() -> _Result:
            fs.invalidate_cache(path)  # other processes write as well
            return request(fs, path)

        return repeated(send, what, self._url)


AnyPath = Path | RemotePath
"""A path of this machine, or the URL of an object store."""
_SUPPORTED: set[str] = set()


def check_scheme(url: str, argument: str) -> None:
    """Check that fsspec can reach the store of a URL.

    Raises:
        MissingDependencyError: fsspec is not installed, or the back end of this scheme.
        SettingsError: fsspec knows no such scheme.
    """
    scheme = url.partition(":")[0]
    if scheme in _SUPPORTED:
        return
    try:
        fsspec = import_module("fsspec")
    except ImportError as error:
        raise MissingDependencyError(
            f"{argument}={url!r} needs fsspec, which is not installed: run `pip install accel-train[remote]`"
        ) from error
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise MissingDependencyError(f"{argument}={url!r}: {first_line(error)}.") from error
    except ValueError as error:
        raise SettingsError(
            f"{argument}={url!r}: fsspec has no file system for the scheme {scheme!r}. Pass a local path, "
            "or a URL such as 's3://bucket/run'."
        ) from error
    _SUPPORTED.add(scheme)


class RangeFile(io.RawIOBase):
    """A seekable file of `size` bytes, read by `read_at`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._position = 0

    @abc.abstractmethod
    def read_at(self, view: memoryview, position: int) -> None:
        """Fill a view with the bytes at a position."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + (0, self._position, self.size)[whence]
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self.size - self._position)]
        self.read_at(view, self._position)
        self._position += len(view)
        return len(view)


class RemoteFile(RangeFile):
    """A file of an object store that is read by range requests, several at once.

    Attributes:
        name: Its URL.
        size: Its size in bytes when it was opened.
    """

    def __init__(self, path: RemotePath) -> None:
        self._threads: ThreadPoolExecutor | None = None
        super().__init__(path.size())
        self.name = str(path)
        self._fs, self._path = path.file_system()
        self._blocks: deque[tuple[int, bytes]] = deque(maxlen=8)
        self._guard = threading.Lock()

    def read_at(self, view: memoryview, position: int) -> None:
        """Fill a view with the bytes at a position; several threads may call it.

        Raises:
            OSError: The file ends there, or cannot be read.
        """
        if len(view) < FIRST_BYTES:
            with self._guard:
                self._read_small(view, position)
            return
        if len(view) <= BLOCK_BYTES:
            view[:] = self._fetch(position, len(view))
            return
        with self._guard:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(READS, "accel-download")

        def read(begin: int) -> None:
            part = view[begin : begin + BLOCK_BYTES]
            part[:] = self._fetch(position + begin, len(part))

        done = [self._threads.submit(read, begin) for begin in range(0, len(view), BLOCK_BYTES)]
        _wait(done)

    def _read_small(self, view: memoryview, position: int) -> None:
        while view:
            begin, block = self._block_at(position)
            part = block[position - begin : position - begin + len(view)]
            view[: len(part)] = part
            view, position = view[len(part) :], position + len(part)

    def _block_at(self, position: int) -> tuple[int, bytes]:
        """Return the offset and content of a cached block that contains a position."""
        for begin, block in self._blocks:
            if begin <= position < begin + len(block):
                return begin, block
        begin, count = position // FIRST_BYTES * FIRST_BYTES, FIRST_BYTES
        last_begin, last = self._blocks[-1] if self._blocks else (0, b"")
        if last and begin == last_begin + len(last):
            count = min(2 * len(last), 8 * FIRST_BYTES)
        self._blocks.append((begin, self._fetch(begin, min(count, self.size - begin))))
        return self._blocks[-1]

    def _fetch(self, begin: int, count: int) -> bytes:
        content = repeated(
            lambda: self._fs.cat_file(self._path, start=begin, end=begin + count) if count else b"",
            f"reading {count} bytes at {begin}",
            self.name,
        )
        if len(content) != count:
            raise OSError(
                errno.EIO,
                f"it ends at byte {begin + len(content)}: it was replaced in the meantime",
                self.name,
            )
        return content

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        super().close()


class RemoteWriter:
    """Write a file of an object store in parts; the file exists after `finish`.

    A file of one part is uploaded in one request. Where the store accepts parts in any order, several are
    uploaded concurrently, and each is retried if it fails. At most `UPLOADS` + 1 parts are in memory.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        self._pending = bytearray()
        self._upload: _StreamUpload | _S3Upload | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._futures: deque[Future[None]] = deque()
        self._count = 0

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        size = len(view)
        while view:
            room = _part_bytes(self._count) - len(self._pending)
            self._pending += view[:room]
            view = view[room:]
            if len(self._pending) == _part_bytes(self._count):
                self._send()
        return size

    def flush(self) -> None:
        """Do nothing; `torch.save` calls it."""

    def finish(self) -> None:
        """Upload the rest, and complete the file.

        Raises:
            OSError: A part could not be uploaded; `abandon` removes the others.
        """
        if self._upload is None:
            self._path.write_bytes(bytes(self._pending))
            return
        if self._pending:
            self._send()
        _wait(self._futures)
        self._upload.complete()
        self._close()

    def abandon(self) -> None:
        """Stop, and remove the uploaded parts."""
        self._close()
        if self._upload is not None:
            self._upload.abort()

    def _send(self) -> None:
        content, self._pending = bytes(self._pending), bytearray()
        if self._upload is None or self._threads is None:
            fs, path = self._path.file_system()
            protocol = fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]
            make = _S3Upload if protocol == "s3" else _StreamUpload
            self._upload = make(fs, path, str(self._path))
            self._threads = ThreadPoolExecutor(self._upload.parallel, "accel-upload")
        self._count += 1
        while len(self._futures) >= self._upload.parallel:
            self._futures.popleft().result()
        self._futures.append(self._threads.submit(self._upload.put, self._count, content))

    def _close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
            self._threads = None


def _part_bytes(count: int) -> int:
    """Return the size of the next part; parts grow, since stores accept at most 10,000 per file."""
    return PART_BYTES << (count // 2500)


def _wait(futures: Iterable[Future[None]]) -> None:
    """Wait for all futures, as they use the caller's memory, then raise the first error."""
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None:
            raise error


class _StreamUpload:
    """An upload that fsspec's back end buffers and sends in order; it retries parts itself.

    `put` accepts parts, numbered from 1, up to `parallel` concurrently; `complete` creates the file.
    """

    parallel = 1

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs, self._path, self._url = fs, path, url
        self._file = fs.open(path, "wb", block_size=PART_BYTES)

    def put(self, number: int, content: bytes) -> None:
        del number
        try:
            self._file.write(content)
        except Exception as error:
            raise OSError(errno.EIO, first_line(error), self._url) from error

    def complete(self) -> None:
        try:
            self._file.close()
        except Exception as error:
            raise OSError(errno.EIO, first_line(error), self._url) from error

    def abort(self) -> None:
        self._file.discard()
        self._file.closed = True  # closing would complete it


class _S3Upload:
    """A multipart upload, as `_StreamUpload`. s3fs's file class uploads one part at a time."""

    parallel = UPLOADS

    def __init__(self, fs: Any, path: str, url: str) -> None:
        self._fs, self._url = fs, url
        bucket, key, _ = fs.split_path(path)
        self._where: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self._parts: dict[int, str] = {}
        self._sizes: dict[int, int] = {}
        made = self._call("create_multipart_upload", "starting an upload")
        self._where["UploadId"] = made["UploadId"]

    def put(self, number: int, content: bytes) -> None:
        made = self._call("upload_part", f"uploading part {number}", PartNumber=number, Body=content)
        self._parts[number], self._sizes[number] = made["ETag"], len(content)

    def complete(self) -> None:
        parts = [{"PartNumber": number, "ETag": self._parts[number]} for number in sorted(self._parts)]
        try:
            self._call("complete_multipart_upload", "completing an upload", MultipartUpload={"Parts": parts})
        except FileNotFoundError:  # no such upload: it was completed, and the response was lost
            if RemotePath(self._url).size() != sum(self._sizes.values()):
                raise

    def abort(self) -> None:
        try:
            self._call("abort_multipart_upload", "removing an upload")
        except OSError as error:
            logger.warning("Parts of %s stay in the store: %s.", self._url, error)

    def _call(self, method: str, what: str, **arguments: Any) -> Any:
        return repeated(lambda: self._fs.call_s3(method, **self._where, **arguments), what, self._url)
