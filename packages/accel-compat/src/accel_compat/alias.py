"""Resolve `import accelerate`, its submodules and its metadata to accel; advise on names that accel lacks.

Every Python process that a program starts imports this module, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder, version
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import accel
import accel_compat
from accel_state.environ import publish, read
from accel_state.lazy import LazyModule

REPORT = "Please report it to the developers of accel-compat, with the library that imports it, and for what."

REFERENCE = "accelerate"
"""The import and distribution name of Accelerate, which resolves to accel."""

REFERENCE_VERSION = "1.15.0"
"""The version of Accelerate whose interface accel implements; the value of `accelerate.__version__`."""

_STARTUP = f"{__file__.rpartition(os.sep)[0]}{os.sep}startup"


def install() -> None:
    """Make `accelerate`, its submodules and its metadata resolve to accel, in this and in child processes.

    Whether Accelerate itself is installed does not matter. Nothing of accel is imported before it is asked
    for. Calling it again does nothing.

    Raises:
        ImportError: Accelerate itself is already imported, and its objects are in use.
    """
    if is_installed():
        return
    if REFERENCE in sys.modules:
        raise ImportError(
            "accel_compat.install() came too late: 'accelerate' is already imported. Call it before "
            "anything imports accelerate, or run the script with `python -m accel_compat`.",
            name=REFERENCE,
        )
    sys.meta_path.insert(0, AliasFinder())
    # A child that is no fork of this process imports `sitecustomize` from this path when it starts.
    paths = read().get("PYTHONPATH", "").split(os.pathsep)
    if _STARTUP not in paths:
        publish({"PYTHONPATH": os.pathsep.join([_STARTUP, *filter(None, paths)])})


def is_installed() -> bool:
    """Return whether `accelerate` resolves to accel in this process."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


class AliasFinder:
    """Find `accelerate`, its submodules and its metadata."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the spec of `accelerate` or of one of its submodules, None for others.

        Raises:
            ModuleNotFoundError: accel has no such submodule.
        """
        del path, target
        if fullname == REFERENCE:
            return ModuleSpec(fullname, cast("Loader", TopLevelLoader()), is_package=True)
        top, _, submodule = fullname.partition(".")
        if top not in {REFERENCE, "accel"} or not submodule:
            return None
        if top == "accel":
            self._refuse_absent(fullname)
            return None
        spec = find_spec(f"accel.{submodule}")
        if spec is None:
            raise _absent_error(fullname)
        is_package = spec.submodule_search_locations is not None
        loader = cast("Loader", SubmoduleLoader(spec))
        return ModuleSpec(fullname, loader, origin=spec.origin, is_package=is_package)

    def _refuse_absent(self, fullname: str) -> None:
        """Refuse `from accelerate.utils import name` where accel has neither the name nor a submodule.

        Raises:
            ModuleNotFoundError: A module that was imported as the alias has neither the name nor a submodule.
        """
        parent, _, _ = fullname.rpartition(".")
        alias = parent.replace("accel", REFERENCE, 1)
        if alias in sys.modules and PathFinder.find_spec(fullname, sys.modules[parent].__path__) is None:
            raise _absent_error(f"{alias}.{fullname.rpartition('.')[2]}")

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution `accelerate` if it is requested by name or with all others."""
        if context is None or context.name is None or context.name.lower() == REFERENCE:
            yield accel_compat.AliasDistribution()


def _absent_error(name: str) -> ModuleNotFoundError:
    """Return the error about a name that accel lacks.

    Its `name` is the package's: Python drops an error whose `name` is the module that it looked for.
    """
    resolved = name.replace(REFERENCE, "accel", 1)
    return ModuleNotFoundError(
        f"No name or module {name!r}: accel answers for accelerate in this process and has no {resolved!r}. "
        f"{REPORT}",
        name=REFERENCE,
    )


class TopLevelLoader:
    """Make the module `accelerate` with the names of accel."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module."""
        return TopLevel(spec.name, accel.__doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Set the versions, and the attributes that every module has."""
        table = vars(accel)
        vars(module).update(
            __version__=REFERENCE_VERSION,
            __accel_version__=table["__accel_version__"],
            __all__=[*table["__all__"]],
            __file__=accel.__file__,
            _EXPORTS=table["_EXPORTS"],
        )
        LazyModule.__setattr__, LazyModule.__delattr__ = _replace_everywhere, _restore_everywhere


_originals: dict[tuple[str, str], Any] = {}
"""The objects that were replaced, by module and name."""


def _replace_everywhere(module: ModuleType, name: str, value: Any) -> None:
    """Assign a name of a module; replace its object in each module of accel that has imported it.

    A program that patches a function under its documented name patches the function that is called.
    """
    key, before = (module.__name__, name), getattr(module, name, module)
    ModuleType.__setattr__(module, name, value)
    # The import system binds a submodule in its package, which is no patch.
    is_submodule = isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}"
    if name.startswith("__") or before is module or (is_submodule and key not in _originals):
        return
    if _originals.setdefault(key, before) is value:
        del _originals[key]
    _replace(name, before, value)


def _restore_everywhere(module: ModuleType, name: str) -> None:
    """Delete a name of a module; `unittest.mock` so ends a patch of a name found through `__getattr__`."""
    replacement, key = vars(module).get(name), (module.__name__, name)
    ModuleType.__delattr__(module, name)
    if key in _originals:
        _replace(name, replacement, _originals.pop(key))


def _replace(name: str, before: object, after: object) -> None:
    for module_name, module in list(sys.modules.items()):
        top = module_name.partition(".")[0]
        if (top in ("accel", REFERENCE) or top.startswith("accel_")) and vars(module).get(
            name, module
        ) is before:
            vars(module)[name] = after


class TopLevel(LazyModule):
    """The module `accelerate`; an assignment to a name of it replaces the name in accel, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {REFERENCE!r} has no attribute {name!r}", name=name)
        try:
            return getattr(accel, name)
        except AttributeError:
            raise AttributeError(
                f"module {REFERENCE!r} has no attribute {name!r}: accel answers for accelerate in this "
                f"process and has no such name. {REPORT}",
                name=name,
            ) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(accel)})


class SubmoduleLoader:
    """Let a submodule of `accelerate` be accel's, the same object under two names.

    Args:
        target: The spec of accel's module.
    """

    def __init__(self, target: ModuleSpec) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import accel's module."""
        del spec
        module = import_module(self._target.name)
        self._spec = module.__spec__
        if not hasattr(module, "__path__"):
            module.__path__ = []  # with a path, Python asks the finder for names that the module lacks
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has just replaced."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of accel's module, for `python -m accelerate.commands.launch`."""
        del fullname
        loader: Any = self._target.loader
        return loader.get_code(self._target.name)

    def get_data(self, path: str) -> bytes:
        """Read a file next to accel's module, such as its table of names."""
        loader: Any = self._target.loader
        return loader.get_data(path)


HOME_PAGE = "https://github.com/huggingface/accelerate"
"""What dependants, such as sentence-transformers, look for in the metadata to tell the distribution."""

_METADATA = f"""\
Metadata-Version: 2.1
Name: {REFERENCE}
Version: {REFERENCE_VERSION}
Summary: accel, under the name of the library whose interface it has
Home-page: {HOME_PAGE}
"""


def version_of_accel() -> str:
    """Return the version of accel, which is that of all its packages."""
    return version("accel-compat")


class AliasDistribution(Distribution):
    """The metadata of a distribution called `accelerate`."""

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA or `top_level.txt`; there are no other files."""
        if filename == "top_level.txt":  # from which `packages_distributions` learns whose module it is
            return f"{REFERENCE}\n"
        return _METADATA if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Locate a file of the distribution, which is accel's."""
        return Path(__file__).parents[1] / path

    @property
    def files(self) -> Iterable[Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: the distribution has no files of its own."""
        return None
