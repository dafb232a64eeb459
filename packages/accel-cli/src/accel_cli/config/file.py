"""Read a config file, YAML or JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

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


def read(path: Path) -> dict[str, object]:
    """Read the top-level table of a YAML or JSON file; JSON is YAML, too.

    Raises:
        SettingsError: There is no such file, or it holds something else.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config file {str(path)!r} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"config file {str(path)!r} is neither YAML nor JSON: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(
            f"config file {str(path)!r} holds {content!r}: expected a table of settings, such as "
            "`num_processes: 2`."
        )
    return {str(key): value for key, value in content.items()}
