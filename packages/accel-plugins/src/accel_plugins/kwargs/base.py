"""Base of kwargs handlers; fields of plugins, validated, and resolved from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from accel_state import environ
from accel_state.errors import SettingsError
from accel_state.settings.environ import parse_environ

if TYPE_CHECKING:
    from collections.abc import Callable


class KwargsHandler:
    """Base of the dataclasses of keyword arguments for objects that `Accelerator` builds.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Lamp(KwargsHandler):
        ...     color: str = "white"
        ...     watts: int = 40
        >>> Lamp(watts=60).to_kwargs()
        {'watts': 60}
    """

    def to_dict(self) -> dict[str, Any]:
        """Return all fields; dictionaries and lists are copied, other values are shared."""
        return {name: _copy(value) for name, value in vars(self).items() if not name.startswith("_")}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose value differs from the default."""
        default = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if default[name] != value}


def expect(owner: object, name: str, wanted: str, holds: Callable[[Any], bool]) -> None:
    """Check that a condition on a field holds."""
    value = getattr(owner, name)
    if not holds(value):
        raise SettingsError(f"{type(owner).__name__}({name}={value!r}): expected {wanted}.")


def expect_flags(owner: Any, *optional: str) -> None:
    """Check that all fields declared as bools are; a string such as `"false"` would count as true.

    Raises:
        SettingsError: A field is neither `True`, `False`, 1 nor 0, nor `None` if it is one of the `optional`.
    """
    for name in (one.name for one in fields(owner) if one.type in {"bool", "bool | None"}):
        wanted, kinds = ("True, False or None", int | None) if name in optional else ("True or False", int)
        expect(owner, name, wanted, partial(_is_flag, kinds))


def _is_flag(kinds: Any, value: Any) -> bool:
    return isinstance(value, kinds) and value in {True, False, None}


def is_count(value: object, *, least: int) -> bool:
    """Return whether a value is an integer of at least `least` (bools excluded)."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, list) else value


def resolve_fields(
    plugin: Any,
    section: str,
    defaults: Mapping[str, Any] | None = None,
    setting_names: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Replace the fields of a plugin that are `None` by what the environment says, else by their defaults.

    Variables of a section of `Settings` are read whether or not its switch is on: whoever makes a plugin
    wants it. `setting_names` maps fields to settings where they differ.

    Returns: The source of each field's value as messages name it: the argument or the variable, with the
    value.
    """
    found = parse_environ(environ.read())
    sources: dict[str, str] = {}
    for one in fields(plugin):
        value = getattr(plugin, one.name)
        sources[one.name] = f"{type(plugin).__name__}({one.name}={value!r})"
        if value is not None:
            continue
        setting = found.get(f"{section}.{(setting_names or {}).get(one.name, one.name)}")
        if setting is not None:
            sources[one.name] = f"{setting.origin}={setting.value!r}"
        setattr(plugin, one.name, setting.value if setting else (defaults or {}).get(one.name))
    return sources
