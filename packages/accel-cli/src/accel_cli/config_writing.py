"""Write a config file, YAML or JSON."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.errors import SettingsError
from accel_state.settings.file import FILE_NAMES, default_config_folder

if TYPE_CHECKING:
    from collections.abc import Mapping


WRITTEN_BY = "# Written by accel "
"""The beginning of a config file's first line; the version follows."""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a table to a file, as JSON if that ends in `.json`, else as YAML; make its folder.

    Raises:
        SettingsError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(path, content), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"config file {str(path)!r} cannot be written: {error.strerror}.") from None


def text_of(path: Path, content: Mapping[str, Any]) -> str:
    """What `write` writes.

    YAML begins with the version of accel, in a comment: other readers of such files refuse unknown keys.
    """
    if path.suffix == ".json":
        return json.dumps(dict(content), indent=2, sort_keys=True) + "\n"
    text = import_module("yaml").safe_dump(dict(content), sort_keys=True, allow_unicode=True)
    return f"{WRITTEN_BY}{version('accel-cli')}\n{text}"


def path_to_write(named: str | None, environ: Mapping[str, str]) -> Path:
    """Where a config file goes."""
    return Path(named).expanduser() if named is not None else default_config_folder(environ) / FILE_NAMES[0]
