"""Write the pages of the API reference, before Sphinx reads its sources.

A public name is documented once, under its shortest import path, on the page of the most special module that
exports it; the pages of other modules that export it link to it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.pycode import ModuleAnalyzer

import accel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sphinx.application import Sphinx

NARROW = (
    "accel_state", "accel_ops", "accel_bigmodel", "accel_quant", "accel_plugins", "accel_trackers",
    "accel_train", "accel_cli", "accel_convert", "accel_inspect", "accel_compat",
)  # fmt: skip
COMMANDS = "accel.commands"
"""Its modules, with a function or two each, share a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A public name: the module that defines it, those that export it, its path and its page."""

    name: str
    defined: str
    exporters: tuple[str, ...]
    path: str
    page: str
    value: Any


@cache
def tables() -> dict[str, dict[str, str]]:
    """Return, for each public module, its names and the modules that define them."""
    found = pkgutil.walk_packages(accel.__path__, "accel.")
    names = ["accel", *(module.name for module in found if not module.name.endswith(".__main__")), *NARROW]
    modules = {name: vars(importlib.import_module(name)) for name in names}
    return {
        name: {each: module["_EXPORTS"][each] for each in module["__all__"]}
        for name, module in modules.items()
        if "_EXPORTS" in module
    }


@cache
def origin(module: str, name: str) -> str:
    """Return the module that defines a name which another may only pass on."""
    value = getattr(importlib.import_module(module), name)
    return value.__module__ if inspect.isclass(value) or inspect.isroutine(value) else module


@cache
def entries() -> dict[tuple[str, str], Entry]:
    """Return the entry of each (name, defining module)."""
    exporters: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module, names in tables().items():
        for name, where in names.items():
            exporters[name, origin(where, name)].append(module)
    return {
        (name, where): Entry(
            name=name,
            defined=where,
            exporters=tuple(modules),
            path=f"{min(modules, key=_length_of_path)}.{name}",
            page=_page(name, modules),
            value=getattr(importlib.import_module(modules[0]), name),
        )
        for (name, where), modules in exporters.items()
    }


def _length_of_path(module: str) -> tuple[bool, int, str]:
    """Sort the modules that export a name: accel before narrow packages, few dots first."""
    return module.partition(".")[0] != "accel", module.count("."), module


def _page(name: str, modules: list[str]) -> str:
    """Choose the most special module: a topic, then one of accel.utils, then accel.utils, then accel."""
    topics = [module for module in modules if module != "accel.accelerator" or name == "Accelerator"]
    first = max(topics, key=lambda one: (one.startswith("accel."), one != "accel.utils", -len(one)))
    return COMMANDS if first.startswith(COMMANDS) else first


def documented(entry: Entry) -> str:
    """Return the directive that documents a name."""
    value = entry.value
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f".. {kind}:: {entry.path}\n   :members:\n{inherited(value)}"
    if inspect.isroutine(value):
        return f".. autofunction:: {entry.path}\n"
    shown = [f"   :value: {value!r}"] if isinstance(value, (str, int, float, list)) else []
    docs = ModuleAnalyzer.for_module(entry.defined).find_attr_docs().get(("", entry.name), [])
    return "\n".join((f".. py:data:: {entry.path}", *shown, "", *(f"   {line}" for line in docs), ""))


def inherited(value: type) -> str:
    """Return the option by which a class shows what it has from bases that have no entry of their own."""
    bases = value.__mro__[1:]
    ours = {entry.value for entry in entries().values() if inspect.isclass(entry.value)}
    hidden = [base for base in bases if base.__module__.startswith("accel_") and base not in ours]
    shown = {base.__name__ for base in bases if base not in hidden}
    return f"   :inherited-members: {', '.join(sorted(shown))}\n" if hidden else ""


def pages() -> Iterator[tuple[str, str]]:
    """Give the name and the text of each page."""
    by_page: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries().values():
        by_page[entry.page].append(entry)
    names = sorted({COMMANDS if name.startswith(COMMANDS) else name for name in tables()})
    for page in names:
        yield page, page_text(page, sorted(by_page[page], key=lambda entry: entry.name))
    lines = ["API reference", "=============", "", "Every public name, by module, from the docstrings.", ""]
    for caption in ("accel", "Single packages"):
        lines += [".. toctree::", f"   :caption: {caption}", "   :titlesonly:", ""]
        lines += [f"   {name}" for name in names if name.startswith("accel_") == (caption != "accel")] + [""]
    yield "index", "\n".join(lines)


def page_text(page: str, own: list[Entry]) -> str:
    """Return a page: what a module is for, its names, and links to those that other pages document."""
    title = f"``{page}``"
    about = inspect.getdoc(importlib.import_module(page)) or ""
    lines = [title, "=" * len(title), "", about, "", *map(documented, own)]
    others = [
        f":py:obj:`~{entry.path}`"
        for name, where in sorted(tables().get(page, {}).items())
        if (entry := entries()[name, origin(where, name)]).page != page
    ]
    if others:
        lines += [".. rubric:: Also exported", "", f"{', '.join(others)}.", ""]
    return "\n".join(lines)


def write_pages(app: Sphinx) -> None:
    """Write the pages that changed; remove those of modules that are gone."""
    folder = Path(app.srcdir) / "reference" / "api"
    folder.mkdir(exist_ok=True)
    wanted = {folder / f"{name}.rst": text for name, text in pages()}
    for path in set(folder.glob("*.rst")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
