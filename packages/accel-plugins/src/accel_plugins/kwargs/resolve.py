"""Resolve the fields of a plugin: an argument wins over the environment, and that over the default."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from accel_state import environ
from accel_state.settings.environ import parse_environ

if TYPE_CHECKING:
    from collections.abc import Mapping


def resolve_fields(
    plugin: Any,
    section: str,
    defaults: Mapping[str, Any] | None = None,
    setting_names: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Replace the fields of a plugin that are `None` by what the environment says, else by their defaults.

    Variables are read whether or not the section's switch is on: whoever makes a plugin wants it.

    Args:
        plugin: An instance of a dataclass.
        section: The section of `Settings` whose variables set fields of the same name.
        defaults: Defaults of fields; the others stay `None`.
        setting_names: Field to the name of its setting, where they differ.

    Returns:
        The source of each field's value as messages name it: the argument or the variable, with the value.

    Raises:
        SettingsError: A variable has a value that cannot be used.
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
