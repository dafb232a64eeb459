"""Compare `accel` with its documented surface (tools/surface.json): names, parameters, defaults, values."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.settings.model import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SURFACE = Path(__file__).with_name("surface.json")
ANY_DEFAULT = ("<unset>", "<factory>")  # how an absent argument is recognised is the implementation's affair


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One documented item: whether it is there, and what is wrong with it if it is."""

    item: str
    present: bool
    wrong: str | None = None


def main() -> int:
    """Print what is missing or wrong; return 1 if anything is."""
    findings = [*compare(json.loads(SURFACE.read_text()))]
    bad = [finding for finding in findings if finding.wrong is not None or not finding.present]
    for finding in bad:
        print(f"{finding.item}: {finding.wrong or 'is missing'}")
    print(f"{len(findings) - len(bad)} of {len(findings)} documented names are there as documented")
    return int(bool(bad))


def compare(surface: dict[str, Any]) -> Iterator[Finding]:
    """Look at every documented item."""
    for module, names in surface["modules"].items():
        for name, entry in names.items():
            yield from compare_name(module, name, entry)
    for command, options in surface["cli"].items():
        yield from compare_command(command, options)
    known = {option.key.partition(".")[0] for option in OPTIONS if option.key}
    for config, keys in surface["config_file_keys"].items():
        for key in keys:
            yield Finding(
                item=f"config {config} {key['name']}",
                present=key["name"] in known,
            )


def compare_command(command: str, options: list[dict[str, Any]]) -> Iterator[Finding]:
    """Look for a command and its options in what its `--help` says."""
    asked = [sys.executable, "-m", "accel_cli", *command.split()[1:], "--help"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    words = set(re.findall(r"[-\w]+", done.stdout)) if done.returncode == 0 else set[str]()
    yield Finding(item=f"cli {command}", present=done.returncode == 0)
    for option in options:
        yield Finding(item=f"cli {command} {option['flags'][0]}", present=set(option["flags"]) <= words)


def compare_name(module: str, name: str, entry: dict[str, Any]) -> Iterator[Finding]:
    """Look at a name of a module, and at its members."""
    item = f"{module} {name}"
    members: dict[str, Any] = entry.get("members", {})
    try:
        thing = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        absent = isinstance(error, AttributeError) or getattr(error, "name", None) == module
        yield Finding(item=item, present=False, wrong=None if absent else f"cannot be imported: {error}")
        for member in members:
            yield Finding(item=f"{item}.{member}", present=False)
        return
    yield Finding(item=item, present=True, wrong=difference(thing, entry))
    for member, documented in members.items():
        yield compare_member(f"{item}.{member}", thing, member, documented)


def compare_member(item: str, owner: Any, member: str, documented: dict[str, Any]) -> Finding:
    """Look at a method, property or attribute of a class."""
    if documented["kind"] == "property":
        annotated = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
        return Finding(item=item, present=hasattr(owner, member) or member in annotated)
    try:
        found = inspect.getattr_static(owner, member)
    except AttributeError:
        return Finding(item=item, present=False)
    by_protocol = member.startswith("__") and member != "__call__"  # called by position, under no name
    if documented["kind"] == "attribute" or by_protocol:
        return Finding(item=item, present=True)
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    skip = 0 if isinstance(found, staticmethod) else 1
    return Finding(
        item=item, present=True, wrong=compare_parameters(function, documented["parameters"], skip=skip)
    )


def difference(thing: Any, entry: dict[str, Any]) -> str | None:
    """What is wrong with a name, or None."""
    compare = COMPARE.get(entry["kind"])
    if compare is not None:
        return compare(thing, entry)
    return None if callable(thing) else f"is {thing!r}, documented is a function"


def compare_enum(thing: Any, entry: dict[str, Any]) -> str | None:
    """Whether an enum has the documented values."""
    if not (isinstance(thing, type) and issubclass(thing, enum.Enum)):
        return f"is {thing!r}, documented is an enum"
    values = {label: member.value for label, member in thing.__members__.items()}
    changed = {label: value for label, value in entry["values"].items() if values.get(label) != value}
    return f"lacks the values {changed!r}" if changed else None


def compare_constant(thing: Any, entry: dict[str, Any]) -> str | None:
    """Whether a constant has the documented value, which is a repr for classes."""
    value = list(thing) if isinstance(thing, (tuple, set, frozenset)) else thing
    same = entry["value"] == "<long>" or value == entry["value"] or list(map(str, value)) == entry["value"]
    return None if same else f"is {value!r}, documented is {entry['value']!r}"


def compare_class(thing: Any, entry: dict[str, Any]) -> str | None:
    """Whether a class is constructed as documented."""
    if not isinstance(thing, type):
        return f"is {thing!r}, documented is a class"
    if entry["kind"] == "dataclass" and not dataclasses.is_dataclass(thing):
        return "is not a dataclass"
    return compare_parameters(thing, entry["init"], skip=0)


def compare_function(thing: Any, entry: dict[str, Any]) -> str | None:
    """Whether a function takes the documented parameters."""
    return compare_parameters(thing, entry["parameters"], skip=0)


def compare_parameters(function: Any, documented: list[dict[str, Any]], *, skip: int) -> str | None:
    """How the parameters of a function differ from the documented ones, which come first and in order."""
    if [parameter["name"] for parameter in documented] == ["*args", "**kwargs"]:
        return None  # documented without parameters of its own
    try:
        parameters = list(inspect.signature(function).parameters.values())[skip:]
    except (TypeError, ValueError) as error:
        return f"has no signature: {error}"
    by_name = {shown(parameter): parameter for parameter in parameters}
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    wanted_positional = [
        d["name"] for d in documented if not d["name"].startswith("*") and not d.get("keyword_only")
    ]
    order = [p.name for p in positional][: len(wanted_positional)]
    if order != wanted_positional:
        return f"takes {order!r} by position, documented is {wanted_positional!r}"
    for want in documented:
        if (parameter := by_name.get(want["name"])) is None:
            return f"does not take {want['name']!r}"
        if (wrong := compare_default(parameter, want)) is not None:
            return wrong
    extra = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        and p.name not in {d["name"] for d in documented}
    ]
    return f"requires {extra!r}, which is not documented" if extra else None


def compare_default(parameter: inspect.Parameter, want: dict[str, Any]) -> str | None:
    """How a parameter's default differs from the documented one."""
    if "default" not in want:
        return (
            None if parameter.kind is not parameter.KEYWORD_ONLY else f"takes {parameter.name!r} by name only"
        )
    if parameter.default is parameter.empty:
        return f"requires {parameter.name!r}, documented is the default {want['default']}"
    if want["default"] in ANY_DEFAULT or text_of(parameter.default) == want["default"]:
        return None
    return f"{parameter.name} defaults to {text_of(parameter.default)}, documented is {want['default']}"


def shown(parameter: inspect.Parameter) -> str:
    """A parameter's name, with its stars."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def text_of(value: Any) -> str:
    """A default as the surface file writes it.

    Example:
        >>> text_of("sum"), text_of(None), text_of(len)
        ("'sum'", 'None', '<len>')
    """
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if inspect.isroutine(value):
        return f"<{value.__name__}>"
    return repr(value)


COMPARE: dict[str, Callable[[Any, dict[str, Any]], str | None]] = {
    "enum": compare_enum,
    "constant": compare_constant,
    "class": compare_class,
    "dataclass": compare_class,
    "function": compare_function,
}

if __name__ == "__main__":
    sys.exit(main())
