"""Compare what `accel` offers with its documented surface (tools/surface.json).

Reports the share covered and lists what is missing. Fails when something documented is offered with other
parameters, defaults or values, or when something covered before (tools/surface_done.txt) is not any more.

    uv run tools/check_surface.py             report
    uv run tools/check_surface.py --update    also add what is covered now to surface_done.txt
    uv run tools/check_surface.py --missing   also list every missing name
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state.settings.model import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOOLS = Path(__file__).resolve().parent
SURFACE = TOOLS / "surface.json"
DONE = TOOLS / "surface_done.txt"
ANY_DEFAULT = ("<unset>", "<factory>")  # how an absent argument is recognised is the implementation's affair


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One documented item: whether it is there, and what is wrong with it if it is."""

    item: str
    present: bool
    wrong: str | None = None


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 1 if something is wrong or lost."""
    parser = argparse.ArgumentParser(description="Compare accel with its documented surface.")
    parser.add_argument("--update", action="store_true", help="record what is covered now")
    parser.add_argument("--missing", action="store_true", help="list every missing name")
    arguments = parser.parse_args(argv)
    findings = list(compare(json.loads(SURFACE.read_text())))
    covered = {finding.item for finding in findings if finding.present and finding.wrong is None}
    wrong = [finding for finding in findings if finding.wrong is not None]
    done = set(DONE.read_text().split("\n")) - {""} if DONE.exists() else set[str]()
    lost = sorted(done - covered)
    print_report(findings, covered, list_missing=arguments.missing)
    for finding in wrong:
        print(f"WRONG {finding.item}: {finding.wrong}")
    for item in lost:
        print(f"LOST {item}: it was covered before")
    new = sorted(covered - done)
    if new and arguments.update:
        DONE.write_text("".join(f"{item}\n" for item in sorted(done | covered)))
    elif new:
        print(f"{len(new)} newly covered; record them with `uv run tools/check_surface.py --update`")
    return int(bool(wrong or lost))


def print_report(findings: list[Finding], covered: set[str], *, list_missing: bool) -> None:
    """Print the share covered by place, and what is missing."""
    totals = Counter(group_of(finding.item) for finding in findings)
    for where, total in totals.items():
        missing = [f.item for f in findings if group_of(f.item) == where and f.item not in covered]
        print(f"{where:<26} {total - len(missing):5} of {total:4}  {1 - len(missing) / total:6.1%}")
        top = [item.partition(" ")[2] for item in missing if "." not in item.partition(" ")[2]]
        if missing and list_missing:
            print(f"    missing: {', '.join(item.partition(' ')[2] for item in missing)}")
        elif top:
            more = f" and {len(top) - 12} more (--missing lists all)" if len(top) > 12 else ""
            print(f"    missing: {', '.join(top[:12])}{more}")
    print(f"{'all':<26} {len(covered):5} of {len(findings):4}  {len(covered) / len(findings):6.1%}")


def group_of(item: str) -> str:
    """The documented place of an item: a module, the command line, or the config file."""
    return item.partition(" ")[0]


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
