"""Read a config file, YAML or JSON."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from accel_state.errors import SettingsError
from accel_state.settings import Given, default_config_file, given_by_file

if TYPE_CHECKING:
    from collections.abc import Mapping


def given_by_config(named: str | None, environ: Mapping[str, str]) -> dict[str, Given]:
    """Read the settings of the config file that applies.

    Args:
        named: The file that the user names; None for the one at the default location, if there is one.
        environ: The environment, which may move the default location.

    Returns:
        Path to value and origin.

    Raises:
        SettingsError: The file cannot be read, is no table, or holds a key or value that cannot be used.
        UnsupportedError: It asks for something that this release does not run.
    """
    path = Path(named).expanduser() if named is not None else default_config_file(environ)
    return {} if path is None else given_by_file(read(path), str(path))


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
    except (getattr(parser, form.error), UnicodeDecodeError) as error:
        raise SettingsError(f"config file {str(path)!r} cannot be read as {form.module}: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"config file {str(path)!r} holds {content!r}: expected a table of settings, such as "
            "`num_processes: 2`."
        )
    return {str(key): value for key, value in cast("dict[object, object]", content).items()}
