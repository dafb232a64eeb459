"""Filling in what a DeepSpeed configuration leaves open, and collecting what contradicts it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from accel_plugins.deepspeed.hf_config import AUTO
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A value that is known without the configuration.

    Args:
        value: The value.
        source: Where it comes from, for messages, such as `"Accelerator(mixed_precision='bf16')"`.
        binding: Whether a configuration that says something else is wrong; else the configuration decides.
    """

    value: Any
    source: str
    binding: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A value of the configuration that contradicts a known one.

    Args:
        key: With dots.
        found: In the configuration.
        known: What it contradicts.
    """

    key: str
    found: Any
    known: Known

    def __str__(self) -> str:
        known = self.known
        return f"{self.key} is {self.found!r} in the configuration, and {known.value!r} by {known.source}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """A configuration after filling in.

    Args:
        config: A new configuration.
        mismatches: What contradicts a binding value.
        open_keys: What is still `"auto"`.
    """

    config: dict[str, Any]
    mismatches: tuple[Mismatch, ...] = ()
    open_keys: tuple[str, ...] = ()


def leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration that is no dictionary, with its key.

    Example:
        >>> [*leaves({"a": {"b": 1, "c": 2}, "d": 3})]
        [('a.b', 1), ('a.c', 2), ('d', 3)]
    """
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(cast("dict[str, Any]", value), f"{prefix}{name}.")
        else:
            yield prefix + name, value


def fill(config: Mapping[str, Any], known: Mapping[str, Known]) -> Filled:
    """Replace every `"auto"` whose value is known, and compare the rest with what is known.

    Args:
        config: A configuration; not changed.
        known: Values by dotted key. Keys that the configuration does not have are not added.

    Example:
        >>> known = {"a": Known(value=1, source="us"), "b.c": Known(value=2, source="us")}
        >>> filled = fill({"a": "auto", "b": {"c": 3}}, known)
        >>> filled.config["a"], [str(one) for one in filled.mismatches]
        (1, ['b.c is 3 in the configuration, and 2 by us'])
    """
    mismatches: list[Mismatch] = []
    unknown: list[str] = []

    def walk(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in node.items():
            key = prefix + name
            if isinstance(value, dict):
                result[name] = walk(cast("dict[str, Any]", value), f"{key}.")
                continue
            found = known.get(key)
            result[name] = found.value if found is not None and _is_auto(value) else value
            if found is not None and found.binding and not _same(result[name], found.value):
                mismatches.append(Mismatch(key=key, found=value, known=found))
            if _is_auto(result[name]):
                unknown.append(key)
        return result

    filled = walk(config, "")
    return Filled(config=filled, mismatches=tuple(mismatches), open_keys=tuple(unknown))


def put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted key, making the dictionaries on the way.

    Example:
        >>> config = {}
        >>> put(config, "zero_optimization.stage", 3)
        >>> config
        {'zero_optimization': {'stage': 3}}
    """
    *above, last = key.split(".")
    for name in above:
        config = config.setdefault(name, {})
    config[last] = value


def refuse_mismatches(mismatches: Sequence[Mismatch]) -> None:
    """Raise if there are any, naming all at once.

    Raises:
        SettingsError: There are some.
    """
    if mismatches:
        raise SettingsError(
            "The DeepSpeed configuration contradicts what was said elsewhere: "
            + "; ".join(map(str, mismatches))
            + ". Say each in one place only, or set it to 'auto' in the configuration."
        )


def refuse_open(open_keys: Sequence[str]) -> None:
    """Raise if some values are still to be filled in.

    Raises:
        SettingsError: There are some.
    """
    if open_keys:
        raise SettingsError(
            "The DeepSpeed configuration leaves open what nothing here says: "
            + ", ".join(f"{key}='auto'" for key in open_keys)
            + ". Give a value, or leave the key out for DeepSpeed's own default."
        )


def refuse_misspelt(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Look for names on the outermost level that DeepSpeed does not know.

    Args:
        config: A configuration.
        names: What the installed version knows.

    Returns:
        Those that are like no known one; DeepSpeed passes over them.

    Raises:
        SettingsError: A name is nearly a known one.
    """
    known = sorted(set(names))
    unknown = [name for name in config if name not in known]
    for name in unknown:
        near = get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            raise SettingsError(
                f"The DeepSpeed configuration has {name!r}: {config[name]!r}, which the installed version of "
                f"DeepSpeed does not know; did you mean {near[0]!r}?"
            )
    return unknown


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == AUTO


def _same(found: Any, known: Any) -> bool:
    # JSON has one kind of number: 2 is 2.0, but true is not 1.
    return isinstance(found, bool) == isinstance(known, bool) and found == known
