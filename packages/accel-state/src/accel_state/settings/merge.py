"""Merge settings by precedence (argument, environment, file, default) and keep their provenance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from accel_state.errors import SettingsError
from accel_state.settings.model import ENGINES, IMPLICIT_SECTIONS, OPTIONAL_SECTIONS, Settings
from accel_state.settings.sections.launch import ENGINE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from accel_state.settings.option import Option


class Layer(IntEnum):
    """The kind of source that a value comes from; the lower number wins."""

    ARGUMENT = 0
    ENVIRONMENT = 1
    FILE = 2
    DEFAULT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcedValue:
    """A parsed value with its source.

    Args:
        value: The parsed value.
        layer: The kind of source.
        origin: The source as messages name it, such as `"argument --num_processes"`.
    """

    value: object
    layer: Layer
    origin: str


TITLES = {
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron-LM",
    "fsdp": "FSDP",
    "parallelism": "tensor, context or sequence parallelism",
}
"""The names of the optional sections in messages."""

DEFAULT = SourcedValue(value=None, layer=Layer.DEFAULT, origin="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Merged settings with their provenance.

    Args:
        settings: The merged settings.
        sourced: Path to the winning value, for every path that has a source.
        conflicts: A sentence for each conflict between sources of equal precedence.
    """

    settings: Settings
    sourced: Mapping[str, SourcedValue]
    conflicts: tuple[str, ...] = ()

    def source_of(self, path: str) -> SourcedValue:
        """Return the source of the value at `path`; `DEFAULT` if it has none."""
        return self.sourced.get(path, DEFAULT)


class ErrorCollector:
    """A reusable context manager that collects `SettingsError`s instead of raising them.

    Attributes:
        found: A sentence for each error.

    Example:
        >>> problems = ErrorCollector()
        >>> for text in ("1", "a", "b"):
        ...     with problems:
        ...         if not text.isdecimal():
        ...             raise SettingsError(f"{text!r} is no number")
        >>> problems.found
        ["'a' is no number", "'b' is no number"]
    """

    def __init__(self) -> None:
        self.found: list[str] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, SettingsError):
            self.found += error.problems
        return isinstance(error, SettingsError)

    def raise_if_any(self) -> None:
        """Raise one SettingsError with all collected errors, if any.

        Raises:
            SettingsError: Errors were collected.
        """
        if self.found:
            raise SettingsError(*self.found)


def parse(option: Option, text: str, layer: Layer, origin: str) -> SourcedValue | None:
    """Parse the text of an option.

    Returns:
        The value and its origin, or None if the text stands for "not given".

    Raises:
        SettingsError: The text cannot be used; the message names it and its origin.

    Example:
        >>> from accel_state.settings.model import BY_KEY
        >>> parse(BY_KEY["num_machines"], "2", Layer.FILE, "key num_machines").value
        2
    """
    if not text:
        return None
    try:
        value = option.parse(text)
    except ValueError as error:
        raise SettingsError(f"{origin} is {text!r}: {error}") from None
    if value is None:
        return None
    return SourcedValue(value=(value,) if option.kind == "list" else value, layer=layer, origin=origin)


def combine(*sources: Mapping[str, SourcedValue]) -> Merged:
    """Merge sources by precedence and raise if they conflict.

    Args:
        *sources: Path to value, in any order; a lower `Layer` wins.

    Raises:
        SettingsError: Sources of equal precedence select different engines.

    Example:
        >>> asked = {"fsdp": SourcedValue(value=True, layer=Layer.ARGUMENT, origin="argument --use_fsdp")}
        >>> combine(asked).settings.fsdp is None
        False
    """
    merged = merge_sources(*sources)
    if merged.conflicts:
        raise SettingsError(*merged.conflicts)
    return merged


def merge_sources(*sources: Mapping[str, SourcedValue]) -> Merged:
    """Merge sources by precedence and collect their conflicts.

    Args:
        *sources: Path to value, in any order; a lower `Layer` wins.

    Example:
        >>> low = {"launch.num_machines": SourcedValue(value=2, layer=Layer.FILE, origin="file")}
        >>> high = {"launch.num_machines": SourcedValue(value=4, layer=Layer.ARGUMENT, origin="flag")}
        >>> merge_sources(low, high).settings.launch.num_machines
        4
    """
    sourced: dict[str, SourcedValue] = {}
    for source in sources:
        for path, value in source.items():
            if value.layer <= sourced.get(path, DEFAULT).layer:
                sourced[path] = value
    switches, conflicts = _switches(sourced)
    sourced |= switches
    sections: dict[str, dict[str, Any]] = {}
    for path, value in sourced.items():
        section, _, name = path.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value.value
    made: dict[str, Any] = {}
    for name, kind in OPTIONAL_SECTIONS.items():
        values = sections.pop(name, {})
        made[name] = kind(**values) if sourced.get(name, DEFAULT).value else None
    made |= {name: kind(**sections.pop(name)) for name, kind in IMPLICIT_SECTIONS.items() if name in sections}
    defaults = Settings()
    made |= {section: replace(getattr(defaults, section), **values) for section, values in sections.items()}
    return Merged(settings=replace(defaults, **made), sourced=sourced, conflicts=conflicts)


def _switches(sourced: Mapping[str, SourcedValue]) -> tuple[dict[str, SourcedValue], tuple[str, ...]]:
    """Select the engine of the source with the highest precedence; name conflicts at that precedence."""
    kind = sourced.get("launch.distributed_type", DEFAULT)
    asked = {name: sourced[name] for name in ENGINES if name in sourced}
    by_kind = ENGINE_TYPES.get(str(kind.value))
    if by_kind is not None and kind.layer <= asked.get(by_kind, DEFAULT).layer:
        asked[by_kind] = replace(kind, value=True)
    on = sorted((one.layer, name) for name, one in asked.items() if one.value)
    conflicts = tuple(
        f"{asked[on[0][1]].origin} asks for {TITLES[on[0][1]]} and {asked[name].origin} for {TITLES[name]}: "
        "choose one."
        for layer, name in on[1:]
        if layer == on[0][0]
    )
    lost = {name: replace(asked[name], value=False) for _, name in on[1:]}
    return asked | lost, conflicts
