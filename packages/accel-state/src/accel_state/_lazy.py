"""The export table of a package: names are imported when they are first asked for (PEP 562)."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
            setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:  # noqa: N807 - PEP 562
        return sorted(exports)

    return __getattr__, __dir__
