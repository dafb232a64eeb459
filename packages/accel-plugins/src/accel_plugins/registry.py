"""The table of strategies, and the entry points that extend it."""

from __future__ import annotations

from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, cast

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from accel_plugins.strategy import StrategyFactory

ENTRY_POINT_GROUP = "accel.strategies"
"""A distribution adds a strategy with `[project.entry-points."accel.strategies"] name = "module:build"`."""

STRATEGIES: Mapping[str, str] = {
    "single": "accel_plugins.strategies.single:build",
    "ddp": "accel_plugins.strategies.ddp:build",
    "deepspeed": "accel_plugins.strategies.deepspeed:build",
    "fsdp1": "accel_plugins.strategies.fsdp1:build",
    "fsdp2": "accel_plugins.strategies.fsdp2:build",
    "tp": "accel_plugins.strategies.tp:build",
}
"""Name to `"module:build"` of the strategies that come with accel."""

DIVIDES_GRADIENTS: frozenset[str] = frozenset({"fsdp1", "fsdp2", "tp"})
"""Strategies under which a rank has parts of gradients, and cannot tell alone whether all are finite."""


def available(installed: Iterable[EntryPoint] | None = None) -> dict[str, str]:
    """All strategies, ours and those of installed distributions.

    Args:
        installed: The entry points to add; those of this environment when `None`.

    Returns:
        Name to `"module:build"`, sorted by name. Nothing is imported.

    Raises:
        SettingsError: Two distributions claim one name, or one of ours.

    Example:
        >>> available([])["ddp"]
        'accel_plugins.strategies.ddp:build'
    """
    found = dict(STRATEGIES)
    for point in entry_points(group=ENTRY_POINT_GROUP) if installed is None else installed:
        if found.setdefault(point.name, point.value) != point.value:
            raise SettingsError(
                f"The entry point {point.name!r} = {point.value!r} in the group {ENTRY_POINT_GROUP!r} takes "
                f"a name that {found[point.name]!r} has already; uninstall one of the two."
            )
    return dict(sorted(found.items()))


def load(name: str) -> StrategyFactory:
    """Import the factory of a strategy.

    Args:
        name: A key of `available()`.

    Raises:
        SettingsError: There is no such strategy.

    Example:
        >>> load("single").__name__
        'build'
    """
    found = available()
    if name not in found:
        near = get_close_matches(name, found, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise SettingsError(
            f"There is no strategy {name!r}: registered are {', '.join(map(repr, found))}{hint}"
        )
    return cast("StrategyFactory", EntryPoint(name, found[name], ENTRY_POINT_GROUP).load())
