"""Tables of rows by name, which installed distributions extend by entry points."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Named(Protocol):
    """A row of a table."""

    @property
    def name(self) -> str:
        """The name under which it is registered."""
        ...


Row = TypeVar("Row", bound=Named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry(Generic[Row]):
    """The rows that come with accel, and those of installed distributions.

    A distribution adds a row with `[project.entry-points."GROUP"] name = "module:ROW"`.

    Args:
        group: The entry-point group.
        kind: The type of a row.
        noun: What a row is, for messages, such as `"strategy"`.
        built_in: The rows that come with accel, by name.

    Example:
        >>> class Color(str):
        ...     name = property(str)
        >>> colors = Registry(group="my.colors", kind=Color, noun="color", built_in={"red": Color("red")})
        >>> colors.find("red")
        'red'
    """

    group: str
    kind: type[Row]
    noun: str
    built_in: Mapping[str, Row]

    def names(self, installed: Iterable[EntryPoint] | None = None) -> list[str]:
        """Return all names, those of installed distributions first; nothing is imported."""
        return [*dict.fromkeys([*(point.name for point in self._points(installed)), *self.built_in])]

    def available(self, installed: Iterable[EntryPoint] | None = None) -> dict[str, Row]:
        """Return all rows by name: those of installed distributions, by name, then the built-in ones.

        Args:
            installed: The entry points to add; those of this environment when `None`.

        Raises:
            SettingsError: Two distributions claim one name, or a built-in one; or what an entry point names
                cannot be imported, or is no such row.
        """
        found: dict[str, Row] = {}
        values: dict[str, str] = dict.fromkeys(self.built_in, "accel's own")
        for point in self._points(installed):
            if values.setdefault(point.name, point.value) != point.value:
                raise SettingsError(
                    f"The entry point {point.name!r} = {point.value!r} in the group {self.group!r} takes "
                    f"a name that {values[point.name]!r} has already; uninstall one of the two."
                )
            found[point.name] = self._load(point)
        return {**found, **self.built_in}

    def find(self, name: str, *, source: str | None = None) -> Row:
        """Return one row."""
        found = self.available()
        if name not in found:
            hint = did_you_mean(name, found, "")
            raise SettingsError(
                f"{f'{source}: ' if source else ''}There is no {self.noun} {name!r}: registered are "
                f"{', '.join(map(repr, found))}{f'; {hint}' if hint else '.'}"
            )
        return found[name]

    def resolve(self, name: str, reference: Any) -> Any:
        """Import what a row names as `"module:object"`; return anything else as it is."""
        return EntryPoint(name, reference, self.group).load() if isinstance(reference, str) else reference

    def _points(self, installed: Iterable[EntryPoint] | None) -> list[EntryPoint]:
        points = entry_points(group=self.group) if installed is None else installed
        return sorted(points, key=lambda point: point.name)

    def _load(self, point: EntryPoint) -> Row:
        about = f"The entry point {point.name!r} = {point.value!r} in the group {self.group!r}"
        try:
            row: Any = point.load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                f"{about} cannot be imported: {error}. Mend or uninstall the distribution that declares it."
            ) from error
        if not isinstance(row, self.kind) or row.name != point.name:
            raise SettingsError(
                f"{about} is {row!r}; it must be a {self.kind.__name__} of the name {point.name!r}."
            )
        return row
