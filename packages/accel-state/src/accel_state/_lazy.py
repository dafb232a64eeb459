"""The export table of a package: names are imported at their first use (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Table(ModuleType):
    """A package or module whose names live in others.

    What is assigned to such a name replaces it there, too, and in each of our modules that has imported it:
    a program that replaces a function under the documented name replaces the one that is called.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_export = name in vars(self).get("_EXPORTS", ()) and not isinstance(value, ModuleType)
        before = getattr(self, name, None) if is_export else None
        super().__setattr__(name, value)
        if is_export:
            replace(name, before, value)


def replace(name: str, before: object, after: object) -> None:
    """Replace an object in each of our modules that has it under a name.

    Args:
        name: The name.
        before: The object.
        after: What takes its place.
    """
    for module in list(sys.modules.values()):
        top = getattr(module, "__name__", "").partition(".")[0]
        if (top == "accel" or top.startswith("accel_")) and vars(module).get(name, module) is before:
            vars(module)[name] = after


def attach(
    package: str, exports: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` for a package whose names live in other modules.

    Args:
        package: The package's `__name__`.
        exports: Public name to the dotted module that defines it. A module itself is exported as
            `"name": "dotted.module.name:"`, with a trailing colon.

    Returns:
        The two functions to bind in the package's `__init__`.

    Example:
        >>> __getattr__, __dir__ = attach("json_api", {"dumps": "json"})
        >>> __getattr__("dumps")({})
        '{}'
    """

    def __getattr__(name: str) -> object:  # noqa: N807 - PEP 562
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        target = exports[name]
        value = import_module(target[:-1]) if target.endswith(":") else getattr(import_module(target), name)
        if package in sys.modules:
            vars(sys.modules[package])[name] = value
        return value

    def __dir__() -> list[str]:  # noqa: N807 - PEP 562
        return sorted(exports)

    if package in sys.modules:
        sys.modules[package].__class__ = Table
    return __getattr__, __dir__
