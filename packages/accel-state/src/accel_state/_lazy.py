"""The exports of a package: names of other modules, imported at their first use (PEP 562)."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_IMPORT = re.compile(r"^from (\S+) import (\([^)]*\)|.*)$", re.MULTILINE)
_AS_ITSELF = re.compile(r"\b(\w+) as \1\b")


class Table(ModuleType):
    """A package or module whose names live in others.

    What is assigned to such a name replaces it there, too, and in each of our modules that has imported it:
    a program that replaces a function under the documented name replaces the one that is called. Deleting
    the name puts the original back everywhere; `unittest.mock` and pytest's `monkeypatch` delete a name that
    they had to ask for.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        originals: dict[str, Any] = vars(self).get("_ORIGINALS", {})
        is_export = name in vars(self).get("_EXPORTS", ())
        # The import system binds a submodule in its package, which replaces nothing.
        if not is_export or (name not in originals and _is_submodule(value, self, name)):
            super().__setattr__(name, value)
            return
        before = getattr(self, name)
        if originals.setdefault(name, before) is value:
            del originals[name]
        super().__setattr__(name, value)
        _replace(name, before, value)

    def __delattr__(self, name: str) -> None:
        replacement = vars(self).get(name)
        super().__delattr__(name)
        originals: dict[str, Any] = vars(self).get("_ORIGINALS", {})
        if name in originals:
            _replace(name, replacement, originals.pop(name))


def _is_submodule(value: object, package: ModuleType, name: str) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == f"{package.__name__}.{name}"


def _replace(name: str, before: object, after: object) -> None:
    """Replace an object in each of our modules that has it under a name, also as `accelerate`."""
    for module in list(sys.modules.values()):
        top = getattr(module, "__name__", "").partition(".")[0]
        is_ours = top in ("accel", "accelerate") or top.startswith("accel_")
        if is_ours and vars(module).get(name, module) is before:
            vars(module)[name] = after


def attach(package: str) -> None:
    """Give a module the names that its stub imports from other modules, each imported at its first use.

    The stub, the file beside the module that ends in `.pyi`, is the one list of them: type checkers read it
    as it is. `__all__` has the public names without submodules.
    """
    module: Any = sys.modules[package]
    spec = module.__spec__
    stub: bytes = spec.loader.get_data(f"{spec.origin.rpartition('.')[0]}.pyi")
    exports = exports_of(stub.decode(), spec.name)

    def __getattr__(name: str) -> object:  # noqa: N807 - PEP 562
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        target = exports[name]
        value = import_module(target[:-1]) if target.endswith(":") else getattr(import_module(target), name)
        vars(module)[name] = value
        return value

    vars(module).update(
        __getattr__=__getattr__,
        __dir__=lambda: sorted(exports),
        __all__=sorted(name for name in exports if name[0] != "_" and exports[name][-1] != ":"),
        _EXPORTS=exports,
        _ORIGINALS={},
    )
    module.__class__ = Table


def exports_of(stub: str, package: str) -> dict[str, str]:
    r"""Return the names that a stub exports: those that it imports as themselves.

    Returns:
        Name to the dotted module that defines it, or to that of a submodule with a trailing colon.

    Example:
        >>> exports_of("from json import dumps as dumps\nfrom zoo import keepers as keepers", "zoo")
        {'dumps': 'json', 'keepers': 'zoo.keepers:'}
    """
    return {
        name: f"{source}.{name}:" if source == package else source
        for source, names in _IMPORT.findall(stub)
        for name in _AS_ITSELF.findall(names)
    }
