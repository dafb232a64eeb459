"""Write the export tables of the package `accel` from `packages/accel-suite/api.toml`.

    uv run tools/gen_exports.py            find new implementations of documented names, write the tables
    uv run tools/gen_exports.py --check    fail if that would change a file

A documented name (tools/surface.json) is exported as soon as a public module of a package defines it with the
documented parameters. Entries of api.toml are kept as they are: where two modules define a name, or where a
name is ours alone, write the entry by hand. `aliases.toml` beside it lists further modules that export names
of api.toml under the paths that users of Accelerate know. `accel/_internal.py`, written by hand, has
names that Accelerate does not document and that libraries import.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import textwrap
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
SUITE = PACKAGES / "accel-suite"
API = SUITE / "api.toml"
ALIASES = SUITE / "aliases.toml"
SURFACE = ROOT / "tools" / "surface.json"
WIDTH = 108
AS = "\N{NO-BREAK SPACE}as\N{NO-BREAK SPACE}"

HEADER = """\
# Every name that `accel` exports, by the module that documents it, and the module that implements it.
# Kept by `uv run tools/gen_exports.py`, which writes the export tables from it. Add an entry by hand only for
# a name that two modules define, or for one that only `accel` has.
"""

PLAIN_ABOUT = "Names under the path by which users of Accelerate import them."
ABOUT = {
    "accel": "One training script, unchanged, on any number of devices.",
    "accel.big_modeling": "Models larger than memory.",
    "accel.checkpointing": "What a saved state consists of.",
    "accel.data_loader": "Data loaders that give each process its share.",
    "accel.errors": "The errors that accel raises on purpose.",
    "accel.hooks": "Hooks around a module's forward pass.",
    "accel.inference": "Pipelined inference over several devices.",
    "accel.launchers": "Starting processes from a notebook or a test.",
    "accel.local_sgd": "Training in which processes agree only now and then.",
    "accel.logging": "Loggers that speak once per run rather than once per process.",
    "accel.optimizer": "The optimizer that `prepare` returns.",
    "accel.optimizers": "Optimizers that know shards.",
    "accel.parallelism_config": "The sizes of the axes of a device mesh.",
    "accel.scheduler": "The scheduler that `prepare` returns.",
    "accel.settings": "What can be set from outside a script, typed.",
    "accel.state": "What this process is: rank, device, precision, accumulation.",
    "accel.tracking": "Experiment trackers.",
    "accel.utils": "Nested data, settings, availability, plugin dataclasses.",
    "accel.utils.deepspeed": "What DeepSpeed's engine is wrapped in.",
    "accel.utils.environment": "Environment variables, CPU topology and driver facts.",
    "accel.utils.fsdp_utils": "Sharded models and their checkpoints.",
}

CALLABLE_MODULE = """
class _CallableModule(LazyModule):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.{name}(*arguments, **options)


# Importing this module binds it in its package, where the name is that of a function.
sys.modules[__name__].__class__ = _CallableModule
"""

MAIN = """main = partial(run, "{command}")
"""

RUN = """
if __name__ == "__main__":
    sys.exit(main())
"""

ATTACH = 'attach(__name__, "accel._internal")'

COMMANDS = {
    "accel.commands.accelerate_cli": None,
    "accel.commands.config": "config",
    "accel.commands.env": "env",
    "accel.commands.estimate": "estimate-memory",
    "accel.commands.launch": "launch",
    "accel.commands.merge": "merge-weights",
    "accel.commands.test": "test",
    "accel.commands.to_fsdp2": "to-fsdp2",
    "accel.commands.tpu": "tpu-config",
}
"""The modules that `python -m` runs, and what follows `accel` then; None for all of `main`."""

SCRIPTS = {
    "accel.test_utils.scripts.test_cli": "accel_train.testing.processes.print_devices",
    "accel.test_utils.scripts.test_ops": "accel_cli.commands.selftest_checks.check_operations",
    "accel.test_utils.scripts.test_script": "accel_cli.commands.selftest_checks.check_script",
    "accel.test_utils.scripts.test_sync": "accel_cli.commands.selftest_checks.check_gradient_sync",
}
"""The scripts that tests start by their path, and the function that each calls."""

Api = dict[str, dict[str, str]]
Parameters = tuple[str, ...]


def main(argv: list[str] | None = None) -> int:
    """Write or check the tables; return 1 if `--check` finds something to write."""
    parser = argparse.ArgumentParser(description="Write the export tables of the package `accel`.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file would change")
    arguments = parser.parse_args(argv)
    api, doubtful = completed(tomllib.loads(API.read_text()) if API.exists() else {})
    for line in doubtful:
        print(line)
    tables = with_aliases(api, tomllib.loads(ALIASES.read_text()))
    wanted = {
        API: api_text(api),
        **{table_path(module, tables): table_text(module, tables) for module in tables},
        **{table_path(module, tables).with_suffix(".pyi"): stub_text(module, tables) for module in tables},
        **programs(tables),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `uv run tools/gen_exports.py`")
        return int(bool(stale))
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


def completed(api: Api) -> tuple[Api, list[str]]:
    """Add the documented names that are implemented by now, sorted; also say which could not be decided."""
    found = implementations()
    surface: dict[str, dict[str, Any]] = json.loads(SURFACE.read_text())["modules"]
    result: Api = {module: dict(names) for module, names in api.items()}
    doubtful: list[str] = []
    for module, names in surface.items():
        for name, entry in names.items():
            if name in result.get(module, {}):
                continue
            modules = sorted(where for where, shape in found[name].items() if fits(entry, shape))
            if len(modules) == 1:
                result.setdefault(module, {})[name] = modules[0]
            elif modules:
                doubtful.append(f"{module}.{name} is defined by {', '.join(modules)}: choose in api.toml")
    return {module: dict(sorted(result[module].items())) for module in sorted(result)}, doubtful


def with_aliases(api: Api, aliases: dict[str, list[str]]) -> Api:
    """Add the modules and names of aliases.toml; where names are defined is looked up in `api`.

    Example:
        >>> with_aliases({"a": {"f": "pkg.m"}}, {"a.b": ["f"]})
        {'a': {'f': 'pkg.m'}, 'a.b': {'f': 'pkg.m'}}
    """
    defined = {name: where for names in api.values() for name, where in names.items()}
    result: Api = {module: dict(names) for module, names in api.items()}
    for module, names in aliases.items():
        result.setdefault(module, {}).update({name: defined[name] for name in names})
    return {module: dict(sorted(result[module].items())) for module in sorted(result)}


def fits(entry: dict[str, Any], shape: Parameters | None) -> bool:
    """Whether a definition can be the documented one: functions must have the documented parameters."""
    if entry["kind"] != "function":
        return True
    documented = [parameter["name"].lstrip("*") for parameter in entry["parameters"]]
    return shape is not None and list(shape[: len(documented)]) == documented


def implementations() -> defaultdict[str, dict[str, Parameters | None]]:
    """Public names of the packages' public modules: where defined, with which parameters if a function."""
    found: defaultdict[str, dict[str, Parameters | None]] = defaultdict(dict)
    for path in sorted(PACKAGES.glob("*/src/*/**/*.py")):
        parts = path.relative_to(PACKAGES).with_suffix("").parts[2:]
        if parts[0] == "accel" or any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        module = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(path.read_text()).body:
            for name, shape in definitions(node):
                if not name.startswith("_"):
                    found[name][module] = shape
    return found


def definitions(node: ast.stmt) -> list[tuple[str, Parameters | None]]:
    """The names that a top-level statement defines."""
    match node:
        case ast.FunctionDef(name=name, args=a):
            starred = [extra for extra in (a.vararg, *a.kwonlyargs, a.kwarg) if extra is not None]
            return [(name, tuple(argument.arg for argument in (*a.posonlyargs, *a.args, *starred)))]
        case ast.ClassDef(name=name):
            return [(name, None)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [(name, None)]
        case ast.Assign(targets=[ast.Name(id=name)]):
            return [(name, None)]
        case _:
            return []


def api_text(api: Api) -> str:
    """The text of api.toml."""
    sections = (
        f'\n["{module}"]\n' + "".join(f'{name} = "{where}"\n' for name, where in names.items())
        for module, names in api.items()
    )
    return HEADER + "".join(sections)


def table_path(module: str, api: Api) -> Path:
    """The file of an export table; a module that has submodules is a package."""
    path = SUITE / "src" / Path(*module.split("."))
    return path / "__init__.py" if is_package(module, api) else path.with_suffix(".py")


def is_package(module: str, api: Api) -> bool:
    """Whether a module has submodules."""
    return any(other.startswith(f"{module}.") for other in (*api, *SCRIPTS))


def programs(api: Api) -> dict[Path, str]:
    """The scripts, and what `python -m` runs of commands whose modules are packages, with their text."""
    scripts = {table_path(script, api): script_text(function) for script, function in SCRIPTS.items()}
    return scripts | {
        table_path(module, api).with_name("__main__.py"): "\n".join(
            (
                f'"""`python -m {module}` is `accel {command}`. Written by tools/gen_exports.py."""',
                "",
                "import sys",
                "",
                f"from {module} import main",
                RUN,
            )
        )
        for module, command in COMMANDS.items()
        if is_package(module, api)
    }


def script_text(function: str) -> str:
    """The text of a script that calls a function."""
    module, _, name = function.rpartition(".")
    lines = (
        '"""A script that tests start by its path. Written by tools/gen_exports.py."""',
        "",
        f"from {module} import {name} as main",
        "",
        '__all__ = ["main"]',
        "",
        'if __name__ == "__main__":',
        "    main()",
    )
    return "\n".join(lines) + "\n"


def table_text(module: str, api: Api) -> str:
    """The text of a module whose names are those of its stub."""
    parent, _, own = module.rpartition(".")
    is_callable = own in api.get(parent, {})
    is_program = module in COMMANDS
    about = ABOUT.get(module, PLAIN_ABOUT)
    lines = [
        f'"""{about} Written by tools/gen_exports.py."""',
        "",
        *(["import sys"] if is_callable or (is_program and not is_package(module, api)) else []),
        *(["from functools import partial"] if COMMANDS.get(module) else []),
        *(["from typing import Any"] if is_callable else []),
        *([""] if is_callable or is_program else []),
        *(["from accel_cli.main import run"] if COMMANDS.get(module) else []),
        f"from accel_state.lazy import {'LazyModule, ' if is_callable else ''}attach",
        "",
        *(version_lines() if module == "accel" else []),
        ATTACH,
        *(["", CALLABLE_MODULE.format(name=own).removesuffix("\n")] if is_callable else []),
        *(program_lines(module, api) if is_program else []),
    ]
    return "\n".join(lines) + "\n"


def stub_text(module: str, api: Api) -> str:
    """The text of a stub: the names that a module has, with where they are defined."""
    by_source: defaultdict[str, list[str]] = defaultdict(list)
    for name, where in api[module].items():
        by_source[where].append(name)
    children = [other.rpartition(".")[2] for other in api if other.rpartition(".")[0] == module]
    by_source[module] += sorted(child for child in children if child not in api[module])
    lines = (
        packed(f"from {where} import (", [f"{name}{AS}{name}" for name in names], ")")
        for where, names in sorted(by_source.items())
        if names
    )
    start = ["# fmt: off", "# ruff: noqa: A004"] if "input" in children else ["# fmt: off"]
    if any(name.startswith("_") for name in api[module]):  # that programs in use import nevertheless
        start.append("# pyright: reportPrivateUsage=false")
    if module == "accel":
        start += ["__version__: str", "__accel_version__: str"]
    if COMMANDS.get(module):
        lines = (*lines, "def main() -> int: ...")
    return "\n".join([*start, *lines]).replace(AS, " as ") + "\n"


def program_lines(module: str, api: Api) -> list[str]:
    """What a module of a command has beside its names: its `main`, and what `python -m` does."""
    command = COMMANDS[module]
    if command is None:
        return [RUN.removesuffix("\n").replace("    sys", "    from accel_cli.main import main\n\n    sys")]
    own = MAIN.format(command=command).removesuffix("\n")
    return [own] if is_package(module, api) else [own, RUN.removesuffix("\n")]


def packed(before: str, items: list[str], after: str) -> str:
    """`before`, the items with commas, `after`: without the brackets if they fit on one line."""
    line = f"{before}{', '.join(items)}".replace("import (", "import ")
    if len(line) <= WIDTH:
        return line
    filled = textwrap.fill(", ".join(items) + ",", WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{before}\n{filled}\n{after}"


def version_lines() -> list[str]:
    """What `accel` says of versions: that of the interface, which scripts check, and its own."""
    (reference,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["reference"]
    own = tomllib.loads((SUITE / "pyproject.toml").read_text())["project"]["version"]
    return [
        f'__version__ = "{reference.removeprefix("accelerate==")}"',
        '"""The version of Accelerate whose interface accel has."""',
        f'__accel_version__ = "{own}"',
        '"""The version of accel."""',
        "",
    ]


if __name__ == "__main__":
    sys.exit(main())
