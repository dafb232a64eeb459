"""Read JSON that others wrote, and parse the paths that users pass."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from accel_state.errors import CheckpointError, SettingsError
from accel_state.remote import AnyPath, RemotePath, check_scheme


def read_json(path: AnyPath, *, what: str = "JSON file") -> Any:
    """Read a JSON file.

    Raises:
        CheckpointError: It is not JSON.
        OSError: It cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not a valid {what}: {error}") from None


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, as Path drops the other; "C:/" is a drive


def any_path(path: str | os.PathLike[str] | RemotePath, argument: str) -> AnyPath:
    """Return a local path, with `~` expanded, or the path of an fsspec URL; `file://` is local.

    Args:
        path: As a user gave it.
        argument: Where it came from, for the message.

    Raises:
        SettingsError: fsspec does not know the scheme.
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
        return Path(path).expanduser()
    name, path_in_store = scheme[1].lower(), text[scheme.end() :].lstrip("/")
    if name in {"file", "local"}:
        has_drive = re.match("[A-Za-z]:/", path_in_store)
        return Path(path_in_store if has_drive else f"/{path_in_store}")
    url = f"{name}://{path_in_store}"
    check_scheme(url, argument)
    return RemotePath(url)


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """Return a path, with `~` expanded; as `any_path`, where it must be local.

    Raises:
        SettingsError: It has a scheme, such as `"s3://bucket/run"`.

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
    return Path(path).expanduser()
