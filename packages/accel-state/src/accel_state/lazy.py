"""Import names at their first use: the exports in a package's stub, and the objects of entry points."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from accel_state.errors import SettingsError, did_you_mean
from accel_state.frozen import frozen

_IMPORT = re.compile(r"^from (\S+) import (\([^)]*\)|.*)$", re.MULTILINE)
_AS_ITSELF = re.compile(r"\b(\w+) as \1\b")


class LazyModule(ModuleType):
    """A package or module whose names are defined in other modules; see `attach`."""


def attach(package: str, internal: str | None = None) -> None:
    """Add to a module the names that its stub imports from other modules, each imported at its first use.

    The stub, the module's `.pyi` file, is the only list of them: type checkers read it as it is. `__all__`
    has the public names without submodules.

    Args:
        package: The name of the module.
        internal: A module whose `NAMES` has, by module, further names with their sources. These, and what
            other modules of the same package export, can be imported although neither `dir()` nor `__all__`
            lists them.
    """
    module: Any = sys.modules[package]
    spec = module.__spec__
    stub: bytes = spec.loader.get_data(f"{spec.origin.rpartition('.')[0]}.pyi")
    exports = exports_of(stub.decode(), spec.name)

    def __getattr__(name: str) -> object:  # noqa: N807 - PEP 562
        # "module", whose object has the same name; "module:object"; or the module itself, "module:"
        source, is_explicit, attribute = (exports.get(name) or _source_elsewhere(module, name)).partition(":")
        value: Any = import_module(source)
        if attribute or not is_explicit:
            value = getattr(value, attribute or name)
        vars(module)[name] = value
        return value

    vars(module).update(
        __getattr__=__getattr__,
        __dir__=lambda: sorted(exports),
        __all__=sorted(name for name in exports if name[0] != "_" and exports[name][-1] != ":"),
        _EXPORTS=exports,
        _INTERNAL=internal,
    )
    module.__class__ = LazyModule


def _source_elsewhere(module: ModuleType, name: str) -> str:
    """Return where a name comes from that a module does not export.

    Raises:
        AttributeError: No module of the package exports it, and it is not in the table of internal names.
    """
    table: str | None = vars(module).get("_INTERNAL")
    if table is not None and not name.startswith("__"):
        source = import_module(table).NAMES.get(module.__name__, {}).get(name)
        if source is None:
            source = _exports_below(module.__name__.partition(".")[0]).get(name)
        if source is not None:
            return source
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name)


@functools.cache
def _exports_below(package: str) -> dict[str, str]:
    """Return what the modules of a package export, but for their submodules."""
    stubs = (path for folder in import_module(package).__path__ for path in Path(folder).rglob("*.pyi"))
    found = {name: source for path in stubs for name, source in exports_of(path.read_text(), "").items()}
    return {name: source for name, source in found.items() if source.partition(".")[0] != package}


def exports_of(stub: str, package: str) -> dict[str, str]:
    r"""Return the names that a stub exports, that is, imports `as` the same name.

    Returns:
        Name to the dotted module that defines it; a submodule maps to its dotted name with a trailing colon.

    Example:
        >>> exports_of("from json import dumps as dumps\nfrom zoo import keepers as keepers", "zoo")
        {'dumps': 'json', 'keepers': 'zoo.keepers:'}
    """
    return {
        name: f"{source}.{name}:" if source == package else source
        for source, names in _IMPORT.findall(stub)
        for name in _AS_ITSELF.findall(names)
    }


def entry_points_of(group: str) -> EntryPoints:
    """Return the entry points of a group."""
    return _entry_points_on((*sys.path,)).select(group=group)


@functools.lru_cache(maxsize=1)
def _entry_points_on(_folders: tuple[str, ...]) -> Any:  # reading 300 distributions takes 0.1 s
    return entry_points()


Row = TypeVar("Row")


@frozen
class Registry(Generic[Row]):
    """A table of built-in rows and rows of installed distributions, which have a `name`.

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
            SettingsError: Two distributions use the same name, or a built-in one. Or the object of an entry
                point cannot be imported or has the wrong type.
        """
        rows: dict[str, Row] = {}
        values: dict[str, str] = dict.fromkeys(self.built_in, "accel's own")
        for point in self._points(installed):
            if values.setdefault(point.name, point.value) != point.value:
                raise SettingsError(
                    f"The entry point {point.name!r} = {point.value!r} in the group {self.group!r} takes "
                    f"a name that {values[point.name]!r} has already; uninstall one of the two."
                )
            rows[point.name] = self._load(point)
        return {**rows, **self.built_in}

    def find(self, name: str, *, source: str | None = None) -> Row:
        """Return one row."""
        rows = self.available()
        if name not in rows:
            hint = did_you_mean(name, rows, "")
            raise SettingsError(
                f"{f'{source}: ' if source else ''}There is no {self.noun} {name!r}: registered are "
                f"{', '.join(map(repr, rows))}{f'; {hint}' if hint else '.'}"
            )
        return rows[name]

    def resolve(self, name: str, reference: Any) -> Any:
        """Import a reference such as `"module:object"`; return anything else as it is."""
        return EntryPoint(name, reference, self.group).load() if isinstance(reference, str) else reference

    def _points(self, installed: Iterable[EntryPoint] | None) -> list[EntryPoint]:
        points = entry_points_of(self.group) if installed is None else installed
        return sorted(points, key=lambda point: point.name)

    def _load(self, point: EntryPoint) -> Row:
        about = f"The entry point {point.name!r} = {point.value!r} in the group {self.group!r}"
        try:
            row: Any = point.load()
        except (ImportError, AttributeError) as error:
            raise SettingsError(
                f"{about} cannot be imported: {error}. Fix or uninstall the distribution that declares it."
            ) from error
        if not isinstance(row, self.kind) or getattr(row, "name", None) != point.name:
            raise SettingsError(
                f"{about} is {row!r}; it must be a {self.kind.__name__} of the name {point.name!r}."
            )
        return row
