"""Take a path that a user gave, which must be one of a local file system."""

from __future__ import annotations

import os
import re
from pathlib import Path

from accel_state.errors import SettingsError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")  # one slash, as Path drops the other; "C:/" is a drive


def local_path(path: str | os.PathLike[str], argument: str) -> Path:
    """Return a path, with `~` expanded.

    Args:
        path: As a user gave it.
        argument: Where it came from, for the message.

    Raises:
        SettingsError: It has a scheme, such as `"s3://bucket/run"`.

    Example:
        >>> local_path("runs/7", "project_dir").name
        '7'
    """
    text = os.fspath(path)
    scheme = _SCHEME.match(text)
    if scheme:
        raise SettingsError(
            f"{argument}={text!r}: paths with the scheme {scheme[1]!r} are not supported yet; give a local "
            "folder, such as one on which the remote file system is mounted."
        )
    return Path(path).expanduser()
