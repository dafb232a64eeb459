"""Write the names that are visible in each module of Accelerate, and where each is defined.

    PYTHON_WITH_ACCELERATE tools/scan_reference.py > packages/accel-suite/reference_names.json

The names come from importing the modules, with the optional libraries that are installed. A value is the
module that defines the name: `"torch.nn:"` for a module itself, `"typing"` for an object of a library,
`"accelerate.state"` for one of another module of Accelerate, `""` for one of the module itself.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from types import ModuleType
from typing import Any

TOP = "accelerate"

SKIPPED = ("accelerate.commands", "accelerate.test_utils.scripts.", "accelerate.utils.rich")
"""The command, whose documented names are in api.toml; programs, which act when they are imported; and a
module that raises without `rich`."""


def main() -> int:
    """Print the table."""
    package = importlib.import_module(TOP)
    paths = pkgutil.walk_packages(package.__path__, f"{TOP}.")
    names = [TOP, *(path.name for path in paths if not path.name.startswith(SKIPPED))]
    modules = [importlib.import_module(name) for name in names]
    table = {module.__name__: names_of(module) for module in modules}
    print(json.dumps(table, indent=1, sort_keys=True))
    return 0


def names_of(module: ModuleType) -> dict[str, str]:
    """Return the names of a module, each with the module that defines it."""
    return {
        name: defining_module(value, name, module.__name__)
        for name, value in vars(module).items()
        if not name.startswith("__")
    }


def defining_module(value: Any, name: str, current: str) -> str:
    """Return the module from which an object can be imported, empty if that is the module itself."""
    if isinstance(value, ModuleType):
        return f"{value.__name__}:"
    own_name = getattr(value, "__name__", None) or name
    candidates = [getattr(value, "__module__", None), "typing"]
    for source in candidates:
        if isinstance(source, str) and source != current and has(source, own_name, value):
            return source if own_name == name else f"{source}:{own_name}"
    return ""


def has(source: str, name: str, value: Any) -> bool:
    """Return whether a module has an object under a name."""
    try:
        return getattr(importlib.import_module(source), name, None) is value
    except ImportError:
        return False


if __name__ == "__main__":
    sys.exit(main())
