"""Read a config file, YAML or JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_state.errors import SettingsError
from accel_state.settings import Given, default_config_file, given_by_file
from accel_state.settings.older import translate

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """A config file, read.

    Args:
        path: Where it is; None if there is none.
        content: Its top-level table, in the present format.
        given: Path of a setting to value and origin.
        notes: What was translated from an older format.
    """

    path: Path | None = None
    content: Mapping[str, Any] = field(default_factory=dict[str, Any])
    given: dict[str, Given] = field(default_factory=dict[str, Given])
    notes: tuple[str, ...] = ()


def given_by_config(named: str | None, environ: Mapping[str, str]) -> dict[str, Given]:
    """Read the settings of the config file that applies, as `read_config` does.

    Args:
        named: The file that the user names; None for the one at the default location, if there is one.
        environ: The environment, which may move the default location.

    Returns:
        Path to value and origin.
    """
    return read_config(named, environ).given


def read_config(named: str | None, environ: Mapping[str, str]) -> ConfigFile:
    """Read the config file that applies.

    Args:
        named: The file that the user names; None for the one at the default location, if there is one.
        environ: The environment, which may move the default location.

    Raises:
        SettingsError: The file cannot be read, is no table, or holds a key or value that cannot be used.
    """
    path = Path(named).expanduser() if named is not None else default_config_file(environ)
    if path is None:
        return ConfigFile()
    translation = translate(read(path))
    advice = f"`accel config update --config_file {path}` rewrites the file"
    notes = [f"{path} is of an older format: {note}" for note in translation.notes]
    return ConfigFile(
        path=path,
        content=translation.content,
        given=given_by_file(translation.content, str(path)),
        notes=(*notes, *([advice] if notes else [])),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How files with some suffix are read: a module, its function, and the error of malformed text."""

    module: str
    function: str
    error: str


_YAML = Format(module="yaml", function="safe_load", error="YAMLError")
FORMATS: Mapping[str, Format] = {
    ".json": Format(module="json", function="loads", error="JSONDecodeError"),
    ".yaml": _YAML,
    ".yml": _YAML,
}
"""By suffix; other files are read as YAML. The parser is imported when there is a file."""


def read(path: Path) -> dict[str, object]:
    """Read the top-level table of a file.

    Raises:
        SettingsError: There is no such file, or it holds something else.
    """
    form = FORMATS.get(path.suffix, _YAML)
    parser = import_module(form.module)
    try:
        content: object = getattr(parser, form.function)(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config file {str(path)!r} cannot be read: {error.strerror}.") from None
    except (getattr(parser, form.error), ValueError, RecursionError) as error:
        raise SettingsError(f"config file {str(path)!r} cannot be read as {form.module}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"config file {str(path)!r} holds {content!r}: expected a table of settings, such as "
            "`num_processes: 2`."
        )
    return {str(key): value for key, value in cast("dict[object, object]", content).items()}
