"""What the documentation of Accelerate names is there: names, parameters, defaults, values, options, keys.

`surface.json` has the documented names of release 1.15, from introspection.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accel_state.settings.model import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

SURFACE = json.loads(Path(__file__).with_name("surface.json").read_text())
ANY_DEFAULT = ("<unset>", "<factory>")  # how an absent argument is recognised is the implementation's affair
STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


@pytest.mark.parametrize("module", SURFACE["modules"])
def test_the_names_of_a_module_are_as_documented(module: str) -> None:
    names = SURFACE["modules"][module]
    values = {name: getattr(importlib.import_module(module), name) for name in names}
    if inspect.ismodule(
        values.get("tqdm")
    ):  # once imported, the callable module stands in its function's place
        values["tqdm"] = values["tqdm"].tqdm
    wrong = [f"{name} {what}" for name, entry in names.items() for what in differences(values[name], entry)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("command", SURFACE["cli"])
def test_a_command_has_the_documented_options(command: str) -> None:
    asked = [sys.executable, "-m", "accel_cli", *command.split()[1:], "--help"]
    words = {*re.findall(r"[-\w]+", subprocess.run(asked, capture_output=True, text=True, check=True).stdout)}
    assert {flag for option in SURFACE["cli"][command] for flag in option["flags"]} <= words


def test_the_config_file_has_the_documented_keys() -> None:
    known = {option.key.partition(".")[0] for option in OPTIONS if option.key}
    assert {key["name"] for keys in SURFACE["config_file_keys"].values() for key in keys} <= known


def differences(value: Any, entry: dict[str, Any]) -> Iterator[str]:
    """Say how a value and its members differ from their documentation."""
    match entry["kind"]:
        case "enum":
            values = {label: member.value for label, member in value.__members__.items()}
            yield from (f"lacks {item!r}" for item in entry["values"].items() if item not in values.items())
        case "constant":
            items = list(value) if isinstance(value, (tuple, set, frozenset)) else value
            if entry["value"] not in ("<long>", items) and list(map(str, items)) != entry["value"]:
                yield f"is {items!r}, documented is {entry['value']!r}"
        case "class" | "dataclass":
            assert isinstance(value, type)
            assert entry["kind"] == "class" or hasattr(value, "__dataclass_fields__")
            yield from parameter_differences(value, entry["init"], skip=0)
        case _:
            assert callable(value)
            if "parameters" in entry:
                yield from parameter_differences(value, entry["parameters"], skip=0)
    annotated = {name for base in getattr(value, "__mro__", ()) for name in inspect.get_annotations(base)}
    for name, member in entry.get("members", {}).items():
        if not hasattr(value, name) and name not in annotated:
            yield f"lacks {name}"
        elif "parameters" in member and (name == "__call__" or not name.startswith("__")):
            found = inspect.getattr_static(value, name)
            function = getattr(found, "__func__", found)
            skip = 0 if isinstance(found, staticmethod) else 1
            wrong = parameter_differences(function, member["parameters"], skip=skip)
            yield from (f".{name} {what}" for what in wrong)


def parameter_differences(function: Any, documented: list[dict[str, Any]], *, skip: int) -> Iterator[str]:
    """Say how parameters differ from the documented ones, which come first and in order."""
    names = [parameter["name"] for parameter in documented]
    if names == ["*args", "**kwargs"]:
        return  # documented without parameters of its own
    parameters = [*inspect.signature(function).parameters.values()][skip:]
    by_name = {STARS.get(parameter.kind, "") + parameter.name: parameter for parameter in parameters}
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    wanted = [
        one["name"] for one in documented if not one["name"].startswith("*") and not one.get("keyword_only")
    ]
    if positional[: len(wanted)] != wanted:
        yield f"takes {positional!r} by position, documented is {wanted!r}"
    for one in documented:
        parameter = by_name.get(one["name"])
        if parameter is None:
            yield f"does not take {one['name']!r}"
        elif "default" in one and one["default"] not in (*ANY_DEFAULT, text_of(parameter.default)):
            yield f"{one['name']} defaults to {text_of(parameter.default)}, documented is {one['default']}"
    for name, parameter in by_name.items():
        if name not in names and not name.startswith("*") and parameter.default is parameter.empty:
            yield f"requires {name!r}, which is not documented"


def text_of(default: Any) -> str:
    """Return a default as the surface file has it."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    return f"<{default.__name__}>" if inspect.isroutine(default) else repr(default)
