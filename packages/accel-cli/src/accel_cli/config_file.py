"""Read and write config files, in YAML or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from accel_state.errors import SettingsError
from accel_state.frozen import frozen
from accel_state.libraries import compare_versions
from accel_state.settings import SourcedValue, default_config_file, parse_file
from accel_state.settings.file import FILE_NAMES, default_config_folder, translate


@frozen
class ConfigFile:
    """The content of a config file.

    Args:
        path: The file; None if there is none.
        content: Its top-level table, in the current format.
        sourced: Its settings by path.
        notes: Notes on the translation from a legacy format.
    """

    path: Path | None = None
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])
    sourced: dict[str, SourcedValue] = field(default_factory=dict[str, SourcedValue])
    notes: tuple[str, ...] = ()


def read_config(named: str | None, environ: Mapping[str, str]) -> ConfigFile:
    """Read the config file that applies."""
    path = Path(named).expanduser() if named is not None else default_config_file(environ)
    if path is None:
        return ConfigFile()
    translation = translate(read(path))
    try:
        sourced = parse_file(translation.content, str(path))
    except SettingsError as error:
        problems = list(error.problems)
        text = path.read_text(encoding="utf-8", errors="replace")
        written = re.fullmatch(rf"{WRITTEN_BY}(\d+(?:\.\d+)*)\s*", text.partition("\n")[0])
        if written is not None and not compare_versions("accel-cli", ">=", written[1]):
            problems.append(
                f"{path} was written by accel {written[1]}, and this is accel {version('accel-cli')}: "
                "install that version, or recreate the file with `accel config`."
            )
        raise SettingsError(*problems) from None
    advice = f"`accel config update --config_file {path}` rewrites the file"
    notes = [f"{path} is in an older format: {note}" for note in translation.notes]
    return ConfigFile(
        path=path,
        content=translation.content,
        sourced=sourced,
        notes=(*notes, advice) if notes else (),
    )


WRITTEN_BY = "# Written by accel "
"""The beginning of a config file's first line; the version follows."""


def read(path: Path) -> dict[str, object]:
    """Read the top-level table of a file: JSON by its suffix, else YAML."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"config file {str(path)!r} cannot be read: {error.strerror}.") from None
    if path.suffix == ".json":
        try:
            content: object = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"{str(path)!r} is not a valid config file in JSON: {error}") from None
    else:
        content = _read_yaml(text, path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"config file {str(path)!r} holds one {type(content).__name__}: expected a table of settings "
            "such as `num_processes: 2`."
        )
    return {str(key): value for key, value in cast("dict[object, object]", content).items()}


def _read_yaml(text: bytes, path: Path) -> object:
    yaml = import_module("yaml")  # Only files in YAML need it.
    try:
        return yaml.safe_load(text.decode())
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        reason = f"{error.problem}{line}"
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = str(error)
    raise SettingsError(f"config file {str(path)!r} cannot be read as YAML: {reason}") from None


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a table to a file, as JSON if its name ends in `.json`, else as YAML; create its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(format_config(path, content), encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"config file {str(path)!r} cannot be written: {error.strerror}.") from None


def format_config(path: Path, content: Mapping[str, Any]) -> str:
    """Return the text of a config file.

    YAML starts with the version of accel in a comment, because other readers of such files reject unknown
    keys.
    """
    if path.suffix == ".json":
        return json.dumps(dict(content), indent=2, sort_keys=True) + "\n"
    text = import_module("yaml").safe_dump(dict(content), sort_keys=True, allow_unicode=True)
    return f"{WRITTEN_BY}{version('accel-cli')}\n{text}"


def path_to_write(named: str | None, environ: Mapping[str, str]) -> Path:
    """Return the path of the config file to write: the named one, else the default."""
    return Path(named).expanduser() if named is not None else default_config_folder(environ) / FILE_NAMES[0]
