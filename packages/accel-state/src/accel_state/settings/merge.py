"""Argument before environment before file before default, and a memory of who said what."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from accel_state.errors import SettingsError
from accel_state.settings.model import BY_CONTENT, ENGINES, SWITCHED, Settings
from accel_state.settings.rows.launch import ENGINE_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_state.settings.option import Option


class Layer(IntEnum):
    """Where settings come from; the lower number wins."""

    ARGUMENT = 0
    ENVIRONMENT = 1
    FILE = 2
    DEFAULT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A value and who gave it.

    Args:
        value: The parsed value.
        layer: Where it comes from.
        origin: The same in words, for messages, such as `"argument --num_processes"`.
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
"""What the sections with a switch are called."""

DEFAULT = Given(value=None, layer=Layer.DEFAULT, origin="default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """Settings, and for every path that somebody gave, who it was.

    Args:
        settings: The outcome.
        given: Path to the winning value.
        conflicts: A sentence for each decision that sources made differently which are equally strong.
    """

    settings: Settings
    given: Mapping[str, Given]
    conflicts: tuple[str, ...] = ()

    def source_of(self, path: str) -> Given:
        """Who decided about `path`; `DEFAULT` if nobody did."""
        return self.given.get(path, DEFAULT)


def parse(option: Option, text: str, layer: Layer, origin: str) -> Given | None:
    """Read the text that somebody gave for an option.

    Args:
        option: A row of `OPTIONS`.
        text: What was written. Empty means not given, as in a shell's `NAME= command`.
        layer: Where it comes from.
        origin: The same in words.

    Returns:
        The value and its origin, or None if the text stands for "not given".

    Raises:
        SettingsError: The text cannot be used; the message names it and its origin.

    Example:
        >>> from accel_state.settings.options import BY_KEY
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
    return Given(value=(value,) if option.shape == "list" else value, layer=layer, origin=origin)


def combine(*sources: Mapping[str, Given]) -> Merged:
    """Let the strongest source of each setting win.

    Args:
        *sources: Path to value, in any order; a lower `Layer` wins.

    Raises:
        SettingsError: Two engines are asked for by sources that are equally strong.

    Example:
        >>> asked = {"fsdp": Given(value=True, layer=Layer.ARGUMENT, origin="argument --use_fsdp")}
        >>> combine(asked).settings.fsdp is None
        False
    """
    merged = weigh(*sources)
    if merged.conflicts:
        raise SettingsError(*merged.conflicts)
    return merged


def weigh(*sources: Mapping[str, Given]) -> Merged:
    """Let the strongest source of each setting win, and note where none is stronger.

    Args:
        *sources: Path to value, in any order; a lower `Layer` wins.

    Example:
        >>> low = {"launch.num_machines": Given(value=2, layer=Layer.FILE, origin="key num_machines")}
        >>> high = {"launch.num_machines": Given(value=4, layer=Layer.ARGUMENT, origin="--num_machines")}
        >>> weigh(low, high).settings.launch.num_machines
        4
    """
    given: dict[str, Given] = {}
    for source in sources:
        for path, value in source.items():
            if value.layer <= given.get(path, DEFAULT).layer:
                given[path] = value
    switches, conflicts = _switches(given)
    given |= switches
    sections: dict[str, dict[str, Any]] = {}
    for path, value in given.items():
        section, _, name = path.partition(".")
        if name:
            sections.setdefault(section, {})[name] = value.value
    made: dict[str, Any] = {}
    for name, kind in SWITCHED.items():
        values = sections.pop(name, {})
        made[name] = kind(**values) if given.get(name, DEFAULT).value else None
    made |= {name: kind(**sections.pop(name)) for name, kind in BY_CONTENT.items() if name in sections}
    defaults = Settings()
    made |= {section: replace(getattr(defaults, section), **values) for section, values in sections.items()}
    return Merged(settings=replace(defaults, **made), given=given, conflicts=conflicts)


def _switches(given: Mapping[str, Given]) -> tuple[dict[str, Given], tuple[str, ...]]:
    """Which engine is on, of several that are asked for: that of the strongest source. And its equals."""
    kind = given.get("launch.distributed_type", DEFAULT)
    asked = {name: given[name] for name in ENGINES if name in given}
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
