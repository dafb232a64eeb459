"""Read, write and restore `os.environ`; no other module accesses it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar, cast

from accel_state.errors import SettingsError

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_NOT_IN_FILES = frozenset(";\n\r\0<> ")
_Decorated = TypeVar("_Decorated", bound="Callable[..., Any]")


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


def set_environment(variables: Mapping[str, str]) -> None:
    """Give this process and its children exactly these variables, until it ends."""
    os.environ.clear()
    os.environ.update(variables)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Parse a boolean.

    Args:
        value: One of y, yes, t, true, on, 1, n, no, f, false, off, 0, in any case.
        to_bool: Return a `bool` rather than 1 or 0.

    Raises:
        SettingsError: `value` is none of these.

    Example:
        >>> str_to_bool("Yes"), str_to_bool("off", to_bool=True)
        (1, False)
    """
    truth = value.strip().lower() in _TRUE
    if not truth and value.strip().lower() not in _FALSE:
        raise SettingsError(f"invalid truth value {value!r}: use 'true' or 'false' (or yes/no, on/off, 1/0)")
    return truth if to_bool else int(truth)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Read the variable `key` as a boolean.

    Raises:
        SettingsError: It is set to a value that is not a boolean.

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
    """Return the first of several variables that is set to an integer of at least 0.

    Args:
        env_keys: Names of variables, in order of preference.
        default: The result when none is set, or all are negative.

    Raises:
        SettingsError: A variable before the first valid one is not an integer.

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
        **kwargs: Names, converted to upper case, and values, converted to text.

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
        remove(before)
        publish({name: value for name, value in before.items() if value is not None})


@contextmanager
def clear_environment() -> Generator[None]:
    """Clear the environment within the block, and restore it afterwards.

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
    r"""Format variables as lines of an environment file, without variables that such a file cannot hold.

    Returns:
        `NAME=value` with a line end, one per variable. A variable whose name or value is empty, or holds
        white space, a line end, `;`, `<` or `>`, or whose name holds `=`, is skipped with a warning.

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
            # Imported here, or every process that has the alias would pay for it.
            import_module("logging").getLogger(__name__).warning(
                "skipped the variable %r=%r: it cannot be written to a line of an environment file",
                name,
                text,
            )
    return lines


def remove(names: Iterable[str]) -> None:
    """Remove variables of this process, if they are set."""
    for name in names:
        os.environ.pop(name, None)


def purge_accelerate_environment(func_or_cls: _Decorated) -> _Decorated:
    """Decorate a function or a class so that `ACCELERATE_*` variables which it sets do not outlive a call.

    Variables that existed before are restored, except those that the function removed; other variables are
    not changed. For a class, this applies to the methods that begin with `test`, including those of
    subclasses; what `setUp` and the like set stays.

    Example:
        >>> from accel_state.environ import publish, read
        >>> @purge_accelerate_environment
        ... def configure():
        ...     publish({"ACCELERATE_MIXED_PRECISION": "bf16"})
        >>> configure()
        >>> "ACCELERATE_MIXED_PRECISION" in read()
        False
    """
    if not isinstance(func_or_cls, type):
        return cast("_Decorated", _purging(func_or_cls))
    decorated: Any = func_or_cls
    _purge_methods(decorated)
    hook = vars(decorated).get("__init_subclass__") or classmethod(
        lambda cls, **kwargs: super(decorated, cls).__init_subclass__(**kwargs)
    )

    def purge_subclass(cls: type, **kwargs: Any) -> None:
        hook.__func__(cls, **kwargs)
        _purge_methods(cls)

    decorated.__init_subclass__ = classmethod(purge_subclass)
    return decorated


def _purge_methods(cls: type) -> None:
    for name, member in list(vars(cls).items()):
        if name.startswith("test"):
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            if inspect.isfunction(function):
                purging = _purging(function)
                setattr(cls, name, purging if function is member else type(member)(purging))


@contextmanager
def _purged() -> Generator[None]:
    before = read()
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            os.environ.pop(name) if name not in before else publish({name: before[name]})


def _purging(function: Callable[..., Any]) -> Callable[..., Any]:
    if not inspect.iscoroutinefunction(function):
        return _purged()(function)

    @functools.wraps(function)
    async def awaiting(*args: Any, **kwargs: Any) -> Any:
        with _purged():
            return await function(*args, **kwargs)

    return awaiting
