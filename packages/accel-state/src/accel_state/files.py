"""Read JSON and pickles that others wrote, and parse the paths that users pass."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

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
