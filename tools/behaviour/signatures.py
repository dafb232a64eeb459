"""The names of the parameters of every documented function and class."""

from __future__ import annotations

import enum
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from cases import cases

TESTS = Path(__file__).resolve().parents[2] / "packages" / "accel-suite" / "tests"
SURFACE = json.loads((TESTS / "surface.json").read_text())["modules"]
FUNCTIONS = tuple(
    (module.partition(".")[2], name)
    for module, names in SURFACE.items()
    if "tracking" not in module
    for name, entry in names.items()
    if not name.startswith("_") and entry.get("kind") != "constant"
)


@cases("signatures", function=FUNCTIONS)
def parameters(lib: Any, *, function: tuple[str, str]) -> Any:
    module, name = function
    found = getattr(importlib.import_module(f"{lib.__name__}.{module}" if module else lib.__name__), name)
    if isinstance(found, type) and issubclass(found, enum.Enum):
        return [one.name for one in found]
    found_parameters = inspect.signature(found).parameters.values()
    entry = SURFACE[f"accel.{module}".removesuffix(".")][name]
    documented = {one["name"] for one in [*entry.get("parameters", ()), *entry.get("init", ())]}
    # What is new in accel can be given by name only; it is no difference.
    return sorted(
        _describe(parameter)
        for parameter in found_parameters
        if parameter.kind is not parameter.KEYWORD_ONLY or parameter.name in documented
    )


def _describe(parameter: inspect.Parameter) -> str:
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return marks.get(parameter.kind, "") + parameter.name
