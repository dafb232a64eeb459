"""Text files that the user names: hostfiles, lists of commands, tables."""

from __future__ import annotations

from pathlib import Path

from accel_state.errors import SettingsError
from accel_state.regular_file import read_regular

_LIMIT = 10_000_000  # bytes; a hostfile of a hundred thousand machines has 4 MB


def text_lines(file: str, what: str) -> list[str]:
    """The lines of a text file.

    Raises:
        SettingsError: It is no regular file, larger than 10 MB, no text in UTF-8, or cannot be read.
    """
    try:
        return read_regular(Path(file).expanduser(), limit=_LIMIT, error=SettingsError).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"{what} {file!r} cannot be read: {reason}.") from None


def command_lines(file: str, what: str) -> list[str]:
    """The lines of a file of commands, without comments and empty lines."""
    return [line for line in map(str.strip, text_lines(file, what)) if line and not line.startswith("#")]
