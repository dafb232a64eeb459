"""Write the pages of the API reference, before Sphinx reads its sources.

It documents the names in api.toml and aliases.toml, and other names that the packages export. A name is
documented once, under its shortest import path, on the page of the module that it belongs to; the pages of
other modules that export it link to it.
"""

from __future__ import annotations

import importlib
import inspect
import tomllib
from collections import defaultdict
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.pycode import ModuleAnalyzer

import gen_exports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sphinx.application import Sphinx

SUITE = Path(__file__).resolve().parents[1] / "packages" / "accel-suite"
TITLES = {
    "accel": "Names of accel itself",
    "accel.accelerator": "Accelerator",
    "accel.big_modeling": "Working with large models",
    "accel.checkpointing": "Checkpointing",
    "accel.commands": "The command, from Python",
    "accel.data_loader": "DataLoaders",
    "accel.errors": "Errors",
    "accel.hooks": "Hooks",
    "accel.inference": "Pipeline parallelism",
    "accel.launchers": "Launchers",
    "accel.local_sgd": "Local SGD",
    "accel.logging": "Logging",
    "accel.memory_utils": "Memory (earlier path)",
    "accel.optimizer": "Optimizers",
    "accel.parallelism_config": "Parallelism",
    "accel.scheduler": "Schedulers",
    "accel.settings": "Settings",
    "accel.state": "Stateful classes",
    "accel.tracking": "Experiment trackers",
    "accel.utils": "Utility functions and classes",
    "accel.utils.ao": "torchao",
    "accel.utils.bnb": "bitsandbytes",
    "accel.utils.constants": "Constants",
    "accel.utils.dataclasses": "Kwargs handlers, plugins and enumerations",
    "accel.utils.deepspeed": "DeepSpeed utilities",
    "accel.utils.environment": "Environment",
    "accel.utils.fsdp_utils": "Fully Sharded Data Parallel utilities",
    "accel.utils.imports": "Availability",
    "accel.utils.launch": "Launching",
    "accel.utils.megatron_lm": "Megatron-LM utilities",
    "accel.utils.memory": "Memory",
    "accel.utils.modeling": "Sizes, device maps and loading",
    "accel.utils.offload": "Offloading",
    "accel.utils.operations": "Nested data and collectives",
    "accel.utils.other": "Other utilities",
    "accel.utils.random": "Random numbers",
    "accel.utils.torch_xla": "PyTorch/XLA",
    "accel.utils.tqdm": "Progress bars",
    "accel.utils.transformer_engine": "Transformer Engine",
    "accel.utils.versions": "Versions",
}
"""What a module is about, in the words that users of Accelerate know; others are titled by their name."""
NARROW = (
    "accel_state", "accel_ops", "accel_bigmodel", "accel_quant", "accel_plugins", "accel_trackers",
    "accel_train", "accel_cli", "accel_convert", "accel_inspect", "accel_compat",
)  # fmt: skip
ONE_PAGE = "accel.commands"
"""Its modules, with a function or two each, share a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A public name: the module that defines it, the path and the page that it is documented under."""

    name: str
    defined: str
    path: str
    page: str

    @property
    def value(self) -> Any:
        """The object itself."""
        module, _, name = self.path.rpartition(".")
        return getattr(importlib.import_module(module), name)


Tables = dict[str, dict[str, str]]


@cache
def documented_names() -> Tables:
    """Return the names of api.toml."""
    return tomllib.loads((SUITE / "api.toml").read_text())


@cache
def tables() -> Tables:
    """Return, for each public module, its names and the modules that define them."""
    api = {module: dict(names) for module, names in documented_names().items()}
    defined = {name: where for names in api.values() for name, where in names.items()}
    aliases: dict[str, list[str]] = tomllib.loads((SUITE / "aliases.toml").read_text())
    for module, names in aliases.items():
        api[module] = {**{name: defined[name] for name in names}, **api.get(module, {})}
    for package in NARROW:
        module = importlib.import_module(package)
        api[package] = {name: vars(module)["_EXPORTS"][name] for name in module.__all__}
    return api


def _module(name: str) -> Any:
    return importlib.import_module(name)


@cache
def origin(module: str, name: str) -> str:
    """Return the module that defines a name which another may only pass on."""
    value = getattr(_module(module), name)
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
            path=f"{min(modules, key=partial(_rank, name))}.{name}",
            page=_page(name, modules),
        )
        for (name, where), modules in exporters.items()
    }


def _rank(name: str, module: str) -> tuple[bool, bool, int, str]:
    """Sort the modules that export a name: accel before narrow packages, aliases last, few dots first."""
    of_accel = module.partition(".")[0] == "accel"
    return (
        not of_accel,
        of_accel and name not in documented_names().get(module, ()),
        module.count("."),
        module,
    )


def _page(name: str, modules: list[str]) -> str:
    """Choose the most special module: a topic, then one of accel.utils, then accel.utils, then accel."""
    topics = [module for module in modules if module != "accel.accelerator" or name == "Accelerator"]
    first = max(
        topics, key=lambda module: (module.startswith("accel."), module != "accel.utils", -len(module))
    )
    return ONE_PAGE if first.startswith(ONE_PAGE) else first


def title_of(page: str) -> str:
    """Return the title of a module's page."""
    return TITLES.get(page, f"``{page}``")


def documented(entry: Entry) -> str:
    """Return the directive that documents a name."""
    value = entry.value
    if inspect.isclass(value):
        kind = "autoexception" if issubclass(value, BaseException) else "autoclass"
        return f".. {kind}:: {entry.path}\n   :members:\n{inherited(value)}"
    if inspect.isroutine(value):
        return f".. autofunction:: {entry.path}\n"
    shown = [f"   :value: {value!r}"] if isinstance(value, (str, int, float, list)) else []
    text = (constant_doc(entry) or "").splitlines()
    return "\n".join((f".. py:data:: {entry.path}", *shown, "", *(f"   {line}" for line in text), ""))


def inherited(value: type) -> str:
    """Return the option by which a class shows what it has from bases that have no entry of their own."""
    bases = value.__mro__[1:]
    ours = {entry.value for entry in entries().values() if inspect.isclass(entry.value)}
    hidden = [base for base in bases if base.__module__.startswith("accel_") and base not in ours]
    shown = {base.__name__ for base in bases if base not in hidden}
    return f"   :inherited-members: {', '.join(sorted(shown))}\n" if hidden else ""


def constant_doc(entry: Entry) -> str | None:
    """Return the text after a constant's assignment."""
    docs = ModuleAnalyzer.for_module(entry.defined).find_attr_docs().get(("", entry.name))
    return "\n".join(docs or ()).strip() or None


def pages() -> Iterator[tuple[str, str]]:
    """Give the name and the text of each page."""
    by_page: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries().values():
        by_page[entry.page].append(entry)
    for module in tables():
        by_page.setdefault(ONE_PAGE if module.startswith(ONE_PAGE) else module, [])
    for page, own in sorted(by_page.items()):
        yield page, page_text(page, sorted(own, key=lambda entry: entry.name))
    yield "index", index_text(sorted(by_page))


def page_text(page: str, own: list[Entry]) -> str:
    """Return a page: what a module is for, its names, and links to those that other pages document."""
    title = title_of(page)
    lines = (
        [title, "=" * len(title), "", f"``{page}``", ""] if page in TITLES else [title, "=" * len(title), ""]
    )
    if page != ONE_PAGE:
        lines += [about(page), ""]
    lines += [documented(entry) for entry in own]
    others = [
        f":py:obj:`~{entry.path}`"
        for name, where in sorted(tables().get(page, {}).items())
        if (entry := entries()[name, origin(where, name)]).page != page
    ]
    if others:
        lines += [".. rubric:: Also exported", "", f"{', '.join(others)}.", ""]
    return "\n".join(lines)


def about(page: str) -> str:
    """Return what a module is for, without the notes of the generator that writes the modules of accel."""
    text = inspect.getdoc(_module(page)) or ""
    for note in ("Written by tools/gen_exports.py.", gen_exports.PLAIN_ABOUT):
        text = text.replace(note, "")
    return text.strip()


def index_text(names: Iterable[str]) -> str:
    """Return the index of all pages."""
    of_accel = [name for name in names if not name.startswith("accel_")]
    narrow = [name for name in names if name.startswith("accel_")]
    title = "API reference"
    return "\n".join([
        title, "=" * len(title), "",
        "Every public name, by module, from the docstrings.", "",
        ".. toctree::", "   :caption: accel", "   :titlesonly:", "", *(f"   {name}" for name in of_accel), "",
        ".. toctree::", "   :caption: Single packages", "   :titlesonly:", "",
        *(f"   {name}" for name in narrow), "",
    ])  # fmt: skip


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
