"""Link public names in backticks, and the types in signatures, to the API reference.

In a page or a docstring, `Accelerator`, `accelerator.prepare`, `gather_for_metrics()` and
`accel.utils.gather` lead to their entries in the reference. A type in a signature does so by the name that
its module knows it by; a type that has no entry (another library's, a type variable) stays as it is
written. Roles that lead nowhere are warnings as ever.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

from api_pages import entries

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

NAME = re.compile(r"[A-Za-z_][\w.]*(?=(\(\))?$)")
PLURAL = re.compile(r"(?<![`\w])(`[^`]+`)(?=\w)")
PLAIN = re.compile(r"[a-z]+")
KNOWN_WORDS = {"accumulate", "autocast", "backward", "broadcast", "gather", "prepare", "reduce"}
"""Names of one lowercase word that mean the function wherever they are in backticks."""


@cache
def targets() -> dict[str, str]:
    """Return what each way of writing a public name leads to."""
    found: dict[str, str] = {}
    for entry in sorted(entries().values(), key=lambda entry: entry.path.startswith("accel_")):
        for module in (*entry.exporters, entry.defined):
            found.setdefault(f"{module}.{entry.name}", entry.path)
        found.setdefault(entry.name, entry.path)
    accelerator = found["Accelerator"]
    (value,) = (entry.value for entry in entries().values() if entry.path == accelerator)
    for name, member in inspect.getmembers(value):
        if not name.startswith("_"):
            found[f"accelerator.{name}"] = f"{accelerator}.{name}"
            if inspect.isroutine(member):  # the names of properties are also those of arguments and settings
                found.setdefault(name, f"{accelerator}.{name}")
    return found


def target_of(text: str) -> str | None:
    """Return the full name that a text in backticks stands for, if it is one."""
    match = NAME.match(text)
    if match is None or (PLAIN.fullmatch(match[0]) and match[0] not in KNOWN_WORDS):
        return None
    name = match[0]
    owner, _, member = name.rpartition(".")
    known = targets()
    return known.get(name) or (f"{known[owner]}.{member}" if owner in known else None)


class LinkNames(SphinxTransform):
    """Replace literals that are public names by references."""

    default_priority = 600

    def apply(self, **_: Any) -> None:
        """Look at every literal that is not in a link, a title or a signature already."""
        closed = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)
        for literal in list(self.document.findall(nodes.literal)):
            target = target_of(literal.astext())
            if target is None or any(isinstance(parent, closed) for parent in _parents(literal)):
                continue
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=target, refexplicit=True, ours=True
            )
            link.source, link.line = literal.source, literal.line
            literal.replace_self(link)
            link += literal


def _parents(node: nodes.Node) -> list[nodes.Node]:
    found: list[nodes.Node] = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, contnode: nodes.Element
) -> nodes.Element | None:
    """Find the entry of a type or name; leave it as written if it has none, unless a role asks."""
    if node.get("refdomain") != "py" or node.get("refwarn"):
        return None
    target = targets().get(node["reftarget"])
    domain = env.domains["py"]
    found = target and domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode)
    return found or contnode


def read_as_written(
    _app: Sphinx, what: str, _name: str, _value: Any, _options: Any, lines: list[str]
) -> None:
    """Let letters follow a backtick; keep a property's first line from being read as `type: text`."""
    lines[:] = [PLURAL.sub(r"\1\\ ", line) for line in lines]
    if what in {"attribute", "data", "property"} and lines and ":" in lines[0]:
        lines.insert(0, "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect to Sphinx."""
    app.setup_extension("sphinx.ext.autodoc")
    app.add_transform(LinkNames)
    app.connect("missing-reference", resolve, priority=900)
    app.connect("autodoc-process-docstring", read_as_written, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
