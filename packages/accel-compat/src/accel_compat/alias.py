"""Finder, absent names, metadata.

Every Python process that a program starts imports this module, so it imports next to nothing itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from email.message import EmailMessage
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

INSTEAD: Mapping[str, str] = {
    "accelerate.commands.estimate.gather_data": "`accel estimate-memory --json` prints the numbers.",
    "accelerate.commands.menu": "It was private; `questionary` asks such questions.",
    "accelerate.test_utils": "It is for Accelerate's own tests; `accel test` checks a machine.",
    "accelerate.utils.megatron_lm": "prepare() makes it; accel.utils has the documented names.",
    "accelerate.utils.modeling.get_state_dict_from_offload": (
        "It was private; accelerate.utils.modeling.get_state_dict_offloaded_model gives all weights."
    ),
}
"""By name, or by that of its module, what is there instead."""


def instead_of(name: str) -> str:
    """Say what to do without a name.

    Args:
        name: The name, from `accelerate.` on.

    Example:
        >>> instead_of("accelerate.utils.megatron_lm.MegatronEngine")
        'prepare() makes it; accel.utils has the documented names.'
    """
    while name:
        if name in INSTEAD:
            return INSTEAD[name]
        name = name.rpartition(".")[0]
    return REPORT


REFERENCE = "accelerate"
"""The import and distribution name that is answered."""

REFERENCE_VERSION = "1.15.0"
"""The version of Accelerate whose interface accel has, and which `accelerate.__version__` says."""

_STARTUP = f"{__file__.rpartition(os.sep)[0]}{os.sep}startup"


def install() -> None:
    """Let `accelerate`, its submodules and its metadata resolve to accel, here and in child processes.

    Whether Accelerate itself is installed does not matter. Nothing of accel is imported before it is asked
    for. Calling it again does nothing.

    Raises:
        ImportError: Accelerate itself has been imported already: its objects are in use.
    """
    if is_installed():
        return
    if REFERENCE in sys.modules:
        raise ImportError(
            "accel_compat.install() came too late: 'accelerate' has been imported already. Call it before "
            "anything imports accelerate, or run the script with `python -m accel_compat`.",
            name=REFERENCE,
        )
    sys.meta_path.insert(0, AliasFinder())
    # Python imports `sitecustomize` from there when it starts, in children that are no forks of this process.
    paths = read().get("PYTHONPATH", "").split(os.pathsep)
    if _STARTUP not in paths:
        publish({"PYTHONPATH": os.pathsep.join([_STARTUP, *filter(None, paths)])})


def is_installed() -> bool:
    """Whether `accelerate` resolves to accel in this process."""
    return any(isinstance(finder, AliasFinder) for finder in sys.meta_path)


class AliasFinder:
    """Answer imports of `accelerate` and of its submodules, and questions for its metadata."""

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
        top, _, rest = fullname.partition(".")
        if top not in {REFERENCE, "accel"} or not rest:
            return None
        if top == "accel":
            self._refuse_absent(fullname)
            return None
        ours = f"accel.{rest}"
        found = find_spec(ours)
        if found is None:
            raise _absent(fullname)
        is_package = found.submodule_search_locations is not None
        loader = cast("Loader", SubmoduleLoader(found))
        return ModuleSpec(fullname, loader, origin=found.origin, is_package=is_package)

    def _refuse_absent(self, fullname: str) -> None:
        """Say what to do about `from accelerate.utils import name`, which asks for a submodule in the end.

        Raises:
            ModuleNotFoundError: A module that was imported as the alias has neither the name nor a submodule.
        """
        parent, _, _ = fullname.rpartition(".")
        alias = parent.replace("accel", REFERENCE, 1)
        if alias in sys.modules and PathFinder.find_spec(fullname, sys.modules[parent].__path__) is None:
            raise _absent(f"{alias}.{fullname.rpartition('.')[2]}")

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution `accelerate` if it is asked for, by its name or with all others."""
        if context is None or context.name is None or context.name.lower() == REFERENCE:
            yield accel_compat.AliasDistribution()


def _absent(name: str) -> ModuleNotFoundError:
    """The error about a name that accel does not serve. It is not called like the name: Python drops that."""
    ours = name.replace(REFERENCE, "accel", 1)
    return ModuleNotFoundError(
        f"No name or module {name!r}: accel answers for accelerate in this process and has no {ours!r}. "
        f"{instead_of(name)}",
        name=REFERENCE,
    )


class TopLevelLoader:
    """Make the module `accelerate`: accel's names, but the version of the reference."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create the module."""
        return TopLevel(spec.name, accel.__doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Set what accel does not answer: its version, and what every module has."""
        table = vars(accel)
        vars(module).update(
            __version__=REFERENCE_VERSION,
            __all__=[*table["__all__"]],
            __file__=accel.__file__,
            _EXPORTS=table["_EXPORTS"],
            _ORIGINALS={},
        )


class TopLevel(LazyModule):
    """The module `accelerate`: what is assigned to its names replaces them in accel, too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {REFERENCE!r} has no attribute {name!r}", name=name)
        try:
            return getattr(accel, name)
        except AttributeError:
            raise AttributeError(
                f"module {REFERENCE!r} has no attribute {name!r}: accel answers for accelerate in this "
                f"process and has no such name. {instead_of(f'{REFERENCE}.{name}')}",
                name=name,
            ) from None

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(accel)})


class SubmoduleLoader:
    """Let a submodule of `accelerate` be accel's, the same object under two names.

    Args:
        ours: The spec of accel's module.
    """

    def __init__(self, ours: ModuleSpec) -> None:
        self._ours = ours
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import accel's module."""
        del spec
        module = import_module(self._ours.name)
        self._spec = module.__spec__
        if not hasattr(module, "__path__"):
            module.__path__ = []  # then the finder is asked for names that it lacks
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back, which the import system has just replaced."""
        module.__spec__ = self._spec

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of accel's module, for `python -m accelerate.commands.launch`."""
        del fullname
        loader: Any = self._ours.loader
        return loader.get_code(self._ours.name)

    def get_data(self, path: str) -> bytes:
        """Read a file beside accel's module, as its table of names does."""
        loader: Any = self._ours.loader
        return loader.get_data(path)


HOME_PAGE = "https://github.com/huggingface/accelerate"
"""What dependants, such as sentence-transformers, look for in the metadata to tell the distribution."""


def version_of_accel() -> str:
    """The version of accel, which is that of all its packages."""
    return version("accel-compat")


class AliasDistribution(Distribution):
    """The metadata of a distribution called `accelerate`."""

    @property
    def metadata(self) -> Any:
        """Name, version and home page, as dependants check them."""
        message = EmailMessage()
        for key, value in {
            "Metadata-Version": "2.1",
            "Name": REFERENCE,
            "Version": REFERENCE_VERSION,
            "Summary": "accel, under the name of the library whose interface it has",
            "Home-page": HOME_PAGE,
        }.items():
            message[key] = value
        return message

    def read_text(self, filename: str) -> str | None:
        """Return the text of METADATA or `top_level.txt`; there are no other files."""
        if filename == "top_level.txt":  # from which `packages_distributions` learns whose module it is
            return f"{REFERENCE}\n"
        return str(self.metadata) if filename == "METADATA" else None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """Locate a file of the distribution, which is accel's."""
        return Path(__file__).parents[1] / path

    @property
    def files(self) -> Iterable[Any] | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """None: the distribution has no files of its own."""
        return None
