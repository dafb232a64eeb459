"""Read files of unknown origin, including JSON and pickles; load the C library.

Opening a FIFO would block, and reading `/dev/zero` would fill memory: only regular files are read, up to
a size limit.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import pickle
import re
import reprlib
import stat
import sys
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, ClassVar

from accel_state.errors import CheckpointError, SettingsError
from accel_state.remote import AnyPath, RemotePath, check_scheme

JSON_LIMIT = 100_000_000
"""Bytes; the limit of the safetensors format for its header, and generous for any index."""

CONFIG_LIMIT = 200_000
"""Bytes of a config file; parsing YAML takes a second per 100 kB."""

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "FIFO",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFSOCK: "socket",
}


def open_regular(
    path: str | os.PathLike[str] | RemotePath, error: Callable[[str], Exception] = CheckpointError
) -> BufferedReader:
    """Open a file for reading, without blocking; raise `error` if it is a folder, FIFO, device or socket.

    Example:
        >>> open_regular("/dev/null")
        Traceback (most recent call last):
        accel_state.errors.CheckpointError: '/dev/null' is a device, not a file
    """
    if isinstance(path, RemotePath):
        return BufferedReader(path.open())
    kind = stat.S_IFMT(Path(path).stat().st_mode)
    if kind == stat.S_IFREG:
        file = open(path, "rb", opener=_open_without_blocking)  # noqa: SIM115 - closed by the caller; Path has no opener
        kind = stat.S_IFMT(os.fstat(file.fileno()).st_mode)  # Another file may have replaced it.
        if kind == stat.S_IFREG:
            return file
        file.close()
    raise error(f"{os.fspath(path)!r} is a {_KINDS.get(kind, 'special file')}, not a file")


def read_regular(
    path: str | os.PathLike[str] | RemotePath,
    *,
    limit: int = JSON_LIMIT,
    error: Callable[[str], Exception] = CheckpointError,
) -> bytes:
    """Read a file in full; raise `error` if it is not a regular file, or has more bytes than `limit`."""
    with open_regular(path, error) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise error(f"{str(path)!r} is larger than {limit} bytes, the bound of such files")
    return content


def read_json(
    path: str | os.PathLike[str] | RemotePath,
    *,
    what: str = "JSON file",
    limit: int = JSON_LIMIT,
    error: Callable[[str], Exception] = CheckpointError,
) -> Any:
    """Read a JSON file."""
    return parse_json(read_regular(path, limit=limit, error=error), path, what=what, error=error)


def parse_json(
    text: str | bytes,
    path: object,
    *,
    what: str = "JSON file",
    error: Callable[[str], Exception] = CheckpointError,
    **how: Any,
) -> Any:
    """Parse JSON, however deep.

    Example:
        >>> parse_json("[" * 100_000, "a.json")
        Traceback (most recent call last):
        accel_state.errors.CheckpointError: 'a.json' is not a valid JSON file: it is nested too deeply
    """
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), **how)
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as problem:
        reason = str(problem)
    raise error(f"{str(path)!r} is not a valid {what}: {reason}")


class RestrictedUnpickler(pickle.Unpickler):
    """Unpickle plain values and torch's dtypes; refuse other classes and functions that are not listed.

    Attributes:
        allowed: The objects that a pickle may refer to, by module and name. Set by subclasses.

    Example:
        >>> import io
        >>> RestrictedUnpickler(io.BytesIO(pickle.dumps({"rank": 0}))).load()
        {'rank': 0}
        >>> RestrictedUnpickler(io.BytesIO(pickle.dumps(print))).load()
        Traceback (most recent call last):
        _pickle.UnpicklingError: builtins.print is not allowed in this file
    """

    allowed: ClassVar[Mapping[tuple[str, str], Any]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return the object of a listed name."""
        allowed = self.allowed.get((module_name, global_name))
        if allowed is None and module_name == "torch":
            known = getattr(sys.modules.get("torch"), global_name, None)
            allowed = known if type(known).__name__ == "dtype" else None
        if allowed is None:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is not allowed in this file")
        return allowed


def _open_without_blocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


_LONGEST_NAME = 255
"""Bytes; the limit of Linux, macOS and Windows."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, as Path drops the other; "C:/" is a drive


def any_path(path: str | os.PathLike[str] | RemotePath, argument: str) -> AnyPath:
    """Return a local path, with `~` expanded, or the path of an fsspec URL; `file://` is local.

    Args:
        path: As a user gave it.
        argument: Where it came from, for the message.

    Raises:
        SettingsError: fsspec does not know the scheme, or a name is too long.
        MissingDependencyError: The back end of the scheme is not installed.

    Example:
        >>> any_path("runs/7", "project_dir").name, any_path("file:///tmp/run", "project_dir").name
        ('7', 'run')
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return local_path(path, argument)
    name, path_in_store = scheme[1].lower(), text[scheme.end() :].lstrip("/")
    if name in {"file", "local"}:
        return local_path(f"/{path_in_store}", argument)
    url = f"{name}://{path_in_store}"
    check_scheme(url, argument)
    return RemotePath(url)


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """Return a path, with `~` expanded.

    Args:
        path: As a user gave it.
        argument: Where it came from, for the message.

    Raises:
        SettingsError: It has a scheme, such as `"s3://bucket/run"`, or a name that is too long.

    Example:
        >>> local_path("runs/7", "logging_dir").name
        '7'
    """
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme:
        raise SettingsError(
            f"{argument}={text!r}: it has the scheme {scheme[1]!r}, and this needs a local folder, such as "
            "one on which the remote file system is mounted."
        )
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in Path(text).parts):
        raise SettingsError(
            f"{argument}={reprlib.repr(text)}: a name in a path has at most {_LONGEST_NAME} bytes."
        )
    return Path(path).expanduser()


@functools.cache
def libc() -> ctypes.CDLL | None:
    """Return the C library; `None` on systems other than Linux.

    Example:
        >>> import os
        >>> library = libc()
        >>> library is None or library.getpid() == os.getpid()
        True
    """
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def trim_heap() -> None:
    """Return freed memory to the system, if the C library supports it.

    glibc keeps freed memory when large and small blocks were freed alternately.
    """
    trim = getattr(libc(), "malloc_trim", None)  # musl has none
    if trim is not None:
        trim(0)
