"""The only module that touches `os.environ`: read it, patch it, publish to it. Torch-free."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_NOT_IN_FILES = frozenset(";\n\r\0<> ")


def read() -> dict[str, str]:
    """Copy the environment of this process.

    Public constructors and the command read it once and pass the copy on.

    Example:
        >>> "PATH" in read()
        True
    """
    return dict(os.environ)


def publish(variables: Mapping[str, str]) -> None:
    """Set variables for this process and its children, for libraries that read them."""
    os.environ.update(variables)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Read a truth value written as text.

    Args:
        value: One of y, yes, t, true, on, 1, n, no, f, false, off, 0, in any case.
        to_bool: Return a `bool` rather than 1 or 0.

    Raises:
        SettingsError: The text is none of these.

    Example:
        >>> str_to_bool("Yes"), str_to_bool("off", to_bool=True)
        (1, False)
    """
    truth = value.strip().lower() in _TRUE
    if not truth and value.strip().lower() not in _FALSE:
        raise SettingsError(f"invalid truth value {value!r}: use 'true' or 'false' (or yes/no, on/off, 1/0)")
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read the variable `key` as a truth value.

    Raises:
        SettingsError: It is set to something that is not a truth value.

    Example:
        >>> parse_flag_from_env("SURELY_NOT_SET", default=True)
        True
    """
    text = os.environ.get(key)
    if text is None:
        return default
    try:
        return bool(str_to_bool(text))
    except SettingsError as error:
        raise SettingsError(f"variable {key}: {error}") from None


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Read the variable `key` as it is.

    Example:
        >>> parse_choice_from_env("SURELY_NOT_SET")
        'no'
    """
    return os.environ.get(key, default)


def get_int_from_env(env_keys: Iterable[str], default: int) -> int:
    """Return the first of several variables that is a number of at least 0.

    Args:
        env_keys: Names of variables, in order of preference.
        default: The answer when none is set, or all are negative.

    Raises:
        SettingsError: A variable that is looked at holds something else than an integer.

    Example:
        >>> get_int_from_env(["SURELY_NOT_SET", "NEITHER_IS_THIS"], 7)
        7
    """
    for key in env_keys:
        text = os.environ.get(key, "-1")
        try:
            number = int(text)
        except ValueError:
            raise SettingsError(f"variable {key}={text!r}: expected an integer") from None
        if number >= 0:
            return number
    return default


@contextmanager
def patch_environment(**kwargs: Any) -> Generator[None]:
    """Set variables within the block, and restore the environment after it.

    Args:
        **kwargs: Names, put in upper case, and values, turned into text.

    Example:
        >>> with patch_environment(my_flag=1):
        ...     read()["MY_FLAG"]
        '1'
    """
    variables = {name.upper(): str(value) for name, value in kwargs.items()}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def clear_environment() -> Generator[None]:
    """Clear the environment within the block, and restore it after it.

    Variables that the block sets are removed.

    Example:
        >>> with clear_environment():
        ...     read()
        {}
    """
    before = read()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return which of these libraries this process has imported.

    Example:
        >>> are_libraries_initialized("sys", "surely_not_imported")
        ['sys']
    """
    return [name for name in library_names if name in sys.modules]


def convert_dict_to_env_variables(current_env: Mapping[str, Any]) -> list[str]:
    r"""Write variables as lines for an environment file, leaving out what such a file cannot hold.

    Returns:
        `NAME=value` with a line end, one per variable. A variable whose name or value is empty, or holds
        white space, a line end, `;`, `<` or `>`, or whose name holds `=`, is left out with a warning.

    Example:
        >>> convert_dict_to_env_variables({"ACCELERATE_DEBUG_MODE": "1"})
        ['ACCELERATE_DEBUG_MODE=1\n']
    """
    lines: list[str] = []
    for name, value in current_env.items():
        text = str(value)
        if name and text and "=" not in name and not _NOT_IN_FILES & {*name, *text}:
            lines.append(f"{name}={text}\n")
        else:
            # Imported here, or every process would pay for it that has the alias.
            import_module("logging").getLogger(__name__).warning(
                "left out the variable %r=%r: a line of an environment file cannot hold it", name, text
            )
    return lines


def accelerate_variables() -> set[str]:
    """Return the names of this process's variables that begin with `ACCELERATE_`."""
    return set(accelerate_values())


def accelerate_values() -> dict[str, str]:
    """Return this process's variables that begin with `ACCELERATE_`."""
    return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}


def restore_accelerate_values(before: Mapping[str, str]) -> None:
    """Remove `ACCELERATE_*` variables that are new, and give those that are left their values back."""
    now = accelerate_variables()
    remove(now - before.keys())
    publish({name: before[name] for name in now & before.keys()})


def remove(names: Iterable[str]) -> None:
    """Remove variables of this process, those that are set."""
    for name in names:
        os.environ.pop(name, None)


def _restore(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
