"""Check the house rules of the layout that no linter has.

environment    only accel_state/environ.py touches the environment
late-import    imports are at the top; laziness is in tables, or in a function for what is OPTIONAL
streams        only accel_state/streams.py makes streams, events, pinned memory, and copies that nobody
               waits for
torch-private  only accel_state/torch_private.py imports the private modules and names of torch
one-version    one version everywhere, and members pin each other to it
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
STREAMS = re.compile(
    r"torch\.(Stream|Event"
    r"|(accelerator|cuda|xpu|npu|mlu)\.(Stream|Event|stream|current_stream|default_stream|set_stream|synchronize))$"
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OPTIONAL = (
    "matplotlib",
    "prompt_toolkit",
    "questionary",
    "rich",
    "torch.distributed.algorithms",
    "tqdm",
)
"""Libraries that are slow to import, and modules of torch: a function that needs them imports them."""
HOST_COPIES = {
    "packages/accel-train/src/accel_train/data/transfer.py",  # batches: events, or the queue, order them
    "packages/accel-trackers/src/accel_trackers/values.py",  # logged values: an event orders them
}
"""Files whose copies nobody waits for at once; each says what orders them."""


@dataclass(frozen=True, slots=True)
class Source:
    """A shipped Python file: its path from the root, its syntax tree."""

    path: str
    tree: ast.Module


def main() -> int:
    """Print every breach; return 1 if there are any."""
    paths = sorted(ROOT.glob("packages/*/src/**/*.py"))
    files = [Source(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())) for path in paths]
    breaches = [breach for source in files for rule in RULES for breach in rule(source)]
    breaches += one_version(ROOT)
    print(*breaches, f"{len(breaches)} breaches", sep="\n")
    return int(bool(breaches))


def environment(source: Source) -> Iterator[str]:
    """Only one module of the packages touches the environment."""
    if source.path.endswith("accel_state/environ.py"):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr=attribute) if attribute in ENVIRONMENT:
                named = attribute
            case ast.ImportFrom(module="os", names=names) if {alias.name for alias in names} & ENVIRONMENT:
                named = "import"
            case _:
                continue
        yield f"environment: {source.path}:{node.lineno}: {named}: ask accel_state.environ"


def late_import(source: Source) -> Iterator[str]:
    """Imports are at the top of the file."""
    for function in (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS)):
        for node in ast.walk(function):
            match node:
                case ast.Import(names=names):
                    modules = [alias.name for alias in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    continue
            for module in modules:
                if any(module == name or module.startswith(f"{name}.") for name in OPTIONAL):
                    continue
                yield f"late-import: {source.path}:{node.lineno}: {module}: move it to the top"


def streams(source: Source) -> Iterator[str]:
    """Only the seam touches what is asynchronous on a device."""
    if source.path.endswith("accel_state/streams.py"):
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute() as function) if STREAMS.match(named := ast.unparse(function)):
                pass
            case ast.Call(func=ast.Attribute(attr="pin_memory" as named)):
                pass
            case ast.Call(func=ast.Attribute(attr="record_stream" as named), args=[_]):
                pass  # a tensor's; that of the seam has two arguments
            case ast.Call(func=ast.Attribute(attr=named) | ast.Name(id=named), keywords=keywords) if any(
                _is_asynchronous(named, keyword) for keyword in keywords
            ):
                pass
            case _:
                continue
        if named not in {"to", "send_to_device"} or source.path not in HOST_COPIES:
            yield f"streams: {source.path}:{node.lineno}: {named}: use accel_state.streams"


def _is_asynchronous(function: str, keyword: ast.keyword) -> bool:
    """Whether an argument makes a copy that nobody waits for, or pins what torch allocates.

    A caller's own `non_blocking` may be passed on, but to `copy_`.
    """
    if keyword.arg == "non_blocking":
        match keyword.value:
            case ast.Constant(value=False):
                return False
            case ast.Name(id="non_blocking") | ast.Attribute(attr="non_blocking"):
                return function == "copy_"
            case _:
                return True
    return keyword.arg == "pin_memory" and function in {
        "empty",
        "zeros",
        "empty_like",
        "zeros_like",
        "tensor",
    }


def torch_private(source: Source) -> Iterator[str]:
    """One module imports torch's private modules and names; private attributes are read wherever needed."""
    if source.path.endswith("accel_state/torch_private.py"):
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for path in paths:
            top, *names = path.split(".")
            if top == "torch" and any(name.startswith("_") for name in names):
                yield f"torch-private: {source.path}:{node.lineno}: {path}: import it in torch_private.py"


RULES: tuple[Callable[[Source], Iterator[str]], ...] = (environment, late_import, streams, torch_private)


def one_version(root: Path) -> Iterator[str]:
    """Every member has the root's version and pins other members to exactly that."""
    wanted: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"]
        for path in sorted(root.glob("packages/*/pyproject.toml"))
    }
    for folder, project in projects.items():
        if project["name"] != folder:
            yield f"one-version: {folder} is the folder of the distribution {project['name']!r}"
        if project["version"] != wanted:
            yield f"one-version: {folder} has version {project['version']}, the workspace {wanted}"
        extras = project.get("optional-dependencies", {}).values()
        for requirement in (*project["dependencies"], *(line for extra in extras for line in extra)):
            name = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
            if name in projects and not requirement.endswith(f"=={wanted}"):
                yield f"one-version: {folder}: {requirement!r} is not pinned to =={wanted}"


if __name__ == "__main__":
    sys.exit(main())
