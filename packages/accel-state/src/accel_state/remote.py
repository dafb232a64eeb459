"""Files on object stores, through fsspec: `RemotePath`, a subset of `pathlib.Path`.

An object store has no folders, no rename and no locks, and may list new files late. A file exists, with all
of its bytes, once its upload is completed. The back end of a store retries requests that fail.
"""

from __future__ import annotations

import errno
import io
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, TypeVar

from accel_state.errors import MissingDependencyError, SettingsError, first_line

SMALL_BYTES = 256 << 10
"""Bytes of the blocks in which smaller reads fetch a file; fsspec keeps the latest 32 of them."""
BLOCK_BYTES = 8 << 20
"""Bytes per request of a large read."""
READS = 8
"""Concurrent requests of a large read."""

_Result = TypeVar("_Result")


class RemotePath:
    """A file or folder of an object store, by its fsspec URL, with methods of `pathlib.Path`.

    Whatever fails raises an `OSError`.

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
        return self._url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self._url.rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def exists(self) -> bool:
        """Return whether the file, or a file below it, exists."""
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Return whether a file below it exists."""
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        """Return `False`: stores have no links."""
        return False

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return int(self._request(lambda fs, path: fs.info(path))["size"])

    def version(self) -> int:
        """Return a number that changes when the file is replaced."""
        return int(self._request(lambda fs, path: fs.checksum(path)))

    def iterdir(self) -> Iterator[RemotePath]:
        rows: list[str] = self._request(
            lambda fs, path: [row for row in fs.ls(path, detail=False) if row.strip("/") != path.strip("/")]
        )
        return iter([self / row.rstrip("/").rpartition("/")[2] for row in rows])

    def glob(self, pattern: str) -> list[RemotePath]:
        return [entry for entry in self.iterdir() if PurePosixPath(entry.name).match(pattern)]

    def sizes(self) -> dict[str, int]:
        """Return the size of every file below the folder, by path with `/` between folders."""

        def find(fs: Any, path: str) -> dict[str, int]:
            begin, rows = len(path.strip("/")) + 1, fs.find(path, detail=True)
            return {name.strip("/")[begin:]: int(row["size"]) for name, row in sorted(rows.items())}

        try:
            return {name: size for name, size in self._request(find).items() if name}
        except FileNotFoundError:
            return {}

    def read_bytes(self) -> bytes:
        return self._request(lambda fs, path: fs.cat_file(path))

    def read_text(self) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, content: bytes) -> None:
        """Write a small file at once."""
        self._request(lambda fs, path: fs.pipe_file(path, content))

    def open(self, mode: Literal["rb"] = "rb") -> BufferedReader:
        del mode
        return BufferedReader(RemoteFile(self))

    @contextmanager
    def create(self) -> Generator[BinaryIO]:
        """Yield a local temporary file to be written, which is uploaded when the block has ended."""
        with tempfile.TemporaryDirectory(prefix="accel-upload-") as folder:
            local = Path(folder) / self.name
            with local.open("wb") as file:
                yield file
            self.upload(local)

    def upload(self, source: Path) -> None:
        """Upload a file of this machine; the back end sends its parts in parallel."""
        self._request(lambda fs, path: fs.put_file(str(source), path))

    def copy_to(self, target: AnyPath) -> None:
        """Copy the file to another path of its store; the bytes stay in the store."""
        _, to = RemotePath(str(target)).file_system()
        self._request(lambda fs, path: fs.cp_file(path, to))

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._request(lambda fs, path: fs.rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Delete all files below the folder, if there are any."""
        try:
            self._request(lambda fs, path: fs.rm(path, recursive=True))
        except FileNotFoundError:
            return

    def file_system(self) -> tuple[Any, str]:
        """Return fsspec's file system, which it caches, and the path in it."""
        return import_module("fsspec").url_to_fs(self._url)

    def _kind(self) -> str | None:
        try:
            return self._request(lambda fs, path: fs.info(path))["type"]
        except FileNotFoundError:
            return None

    def _request(self, send: Callable[[Any, str], _Result]) -> _Result:
        fs, path = self.file_system()
        fs.invalidate_cache(path)  # other processes write as well
        with _named_errors(self._url):
            return send(fs, path)


@contextmanager
def _named_errors(url: str) -> Generator[None]:
    """Turn an error of a back end into an `OSError` of its class and number that names the file."""
    try:
        yield
    except Exception as error:
        numbers = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
        number = next((number for kind, number in numbers.items() if isinstance(error, kind)), errno.EIO)
        raise OSError(getattr(error, "errno", None) or number, first_line(error), url) from error


AnyPath = Path | RemotePath
"""A path of this machine, or the URL of an object store."""


def check_scheme(url: str, argument: str) -> None:
    """Check that fsspec can reach the store of a URL.

    Raises:
        MissingDependencyError: fsspec is not installed, or the back end of this scheme.
        SettingsError: fsspec knows no such scheme.
    """
    scheme = url.partition(":")[0]
    try:
        import_module("fsspec").get_filesystem_class(scheme)
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"{argument}={url!r} needs fsspec, which is not installed: run `pip install accel-train[remote]`"
        ) from error
    except ImportError as error:
        raise MissingDependencyError(f"{argument}={url!r}: {first_line(error)}.") from error
    except ValueError as error:
        raise SettingsError(
            f"{argument}={url!r}: fsspec has no file system for the scheme {scheme!r}. Pass a local path, "
            "or a URL such as 's3://bucket/run'."
        ) from error


class RemoteFile(io.RawIOBase):
    """A file of an object store: small reads share blocks, and a large one is several concurrent requests.

    Attributes:
        name: Its URL.
        size: Its size in bytes when it was opened.
    """

    def __init__(self, path: RemotePath) -> None:
        self.size = path.size()
        self._position = 0
        self.name = str(path)
        self._fs, self._path = path.file_system()
        with _named_errors(self.name):
            self._blocks = self._fs.open(self._path, "rb", block_size=SMALL_BYTES, cache_type="blockcache")
        self._guard = threading.Lock()

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

    def read_at(self, view: memoryview, position: int) -> None:
        """Fill a view with the bytes at a position; several threads may call it.

        Raises:
            OSError: The file ends there, or cannot be read.
        """
        done = 0
        while done < len(view):
            parts = self._fetch(position + done, min(len(view) - done, READS * BLOCK_BYTES))
            for part in parts:
                view[done : done + len(part)] = part
                done += len(part)
            if not all(parts):
                raise OSError(errno.EIO, f"it ends at byte {position + done}: it was replaced", self.name)

    def _fetch(self, begin: int, count: int) -> list[bytes]:
        with _named_errors(self.name):
            if count < SMALL_BYTES:
                with self._guard:
                    self._blocks.seek(begin)
                    return [self._blocks.read(count)]
            starts = [*range(begin, begin + count, BLOCK_BYTES)]
            ends = [min(start + BLOCK_BYTES, begin + count) for start in starts]
            return self._fs.cat_ranges([self._path] * len(starts), starts, ends, on_error="raise")

    def close(self) -> None:
        self._blocks.close()
        super().close()
