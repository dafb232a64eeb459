"""Check the house rules of the layout that no linter has.

streams        only accel_state/streams.py makes streams, events, pinned memory, and copies that nobody
               waits for
torch-private  only accel_state/torch_private.py imports the private modules and names of torch
declared       members declare what they import, and the metapackage all members below it
one-version    one version everywhere, and members pin each other to it
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
STREAMS = re.compile(
    r"torch\.(Stream|Event"
    r"|(accelerator|cuda|xpu|npu|mlu)\.(Stream|Event|stream|current_stream|default_stream|set_stream|synchronize))$"
)
ALLOCATIONS = {"empty", "zeros", "empty_like", "zeros_like", "tensor"}
HOST_COPIES = {
    "packages/accel-train/src/accel_train/data/transfer.py",  # batches: events, or the queue, order them
    "packages/accel-trackers/src/accel_trackers/values.py",  # logged values: an event orders them
}
"""Files whose copies nobody waits for at once; each says what orders them."""
METAPACKAGE = "accel-suite"
DEPTRY = str(Path(sys.executable).with_name("deptry"))
NAME = re.compile(r"[\w-]+")


def main() -> int:
    """Print every breach; return 1 if there are any."""
    breaches = [*one_version(ROOT), *declared()]
    for file in sorted(ROOT.glob("packages/*/src/**/*.py")):
        path, tree = file.relative_to(ROOT).as_posix(), ast.parse(file.read_text())
        for node in ast.walk(tree):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            named = None if path.endswith("accel_state/streams.py") else asynchronous(node)
            if named is not None and (named not in {"to", "send_to_device"} or path not in HOST_COPIES):
                breaches.append(f"streams: {where}: {named}: use accel_state.streams")
            if not path.endswith("accel_state/torch_private.py"):
                private = [name for name in imported(node) if re.match(r"torch\.(.*\.)?_", name)]
                breaches += [
                    f"torch-private: {where}: {name}: import it in torch_private.py" for name in private
                ]
    print(*breaches, f"{len(breaches)} breaches", sep="\n")
    return int(bool(breaches))


def asynchronous(node: ast.AST) -> str | None:
    """Return the name of a call that only the seam may make: of what is asynchronous on a device."""
    match node:
        case ast.Call(func=ast.Attribute() as function) if STREAMS.match(named := ast.unparse(function)):
            return named
        case ast.Call(func=ast.Attribute(attr="pin_memory" as named)):
            return named
        case ast.Call(func=ast.Attribute(attr="record_stream" as named), args=[_]):
            return named  # a tensor's; that of the seam has two arguments
        case ast.Call(func=ast.Attribute(attr=named) | ast.Name(id=named), keywords=keywords):
            return named if any(_is_asynchronous(named, keyword) for keyword in keywords) else None
        case _:
            return None


def _is_asynchronous(function: str, keyword: ast.keyword) -> bool:
    """Whether an argument makes a copy that nobody waits for, or pins what torch allocates.

    A caller's own `non_blocking` may be passed on, but to `copy_`.
    """
    match keyword:
        case ast.keyword(arg="non_blocking", value=ast.Constant(value=False)):
            return False
        case ast.keyword(arg="non_blocking", value=ast.Name(id=passed) | ast.Attribute(attr=passed)):
            return passed != "non_blocking" or function == "copy_"
        case _:
            return keyword.arg == "non_blocking" or (keyword.arg == "pin_memory" and function in ALLOCATIONS)


def imported(node: ast.AST) -> list[str]:
    """Return the full names that a statement imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names):
            return [f"{module}.{alias.name}" for alias in names]
        case _:
            return []


def projects(root: Path) -> dict[str, dict[str, Any]]:
    """Return what the members say of themselves, by folder."""
    paths = sorted(root.glob("packages/*/pyproject.toml"))
    return {path.parent.name: tomllib.loads(path.read_text())["project"] for path in paths}


def declared() -> Iterator[str]:
    """Members declare what they import, as deptry sees it; the metapackage declares all below it."""
    members = projects(ROOT)
    for name in members.keys() - {METAPACKAGE}:
        command, folder = [DEPTRY, "src", "--no-ansi"], ROOT / "packages" / name
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            yield f"declared: {name}: {done.stderr}"
    needed = {match[0] for line in members[METAPACKAGE]["dependencies"] if (match := NAME.match(line))}
    for other in sorted(members.keys() - needed - {METAPACKAGE, "accel-compat"}):  # which is above it
        yield f"declared: {METAPACKAGE} does not declare {other}"


def one_version(root: Path) -> Iterator[str]:
    """Every member has the root's version and pins other members to exactly that."""
    wanted: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    members = projects(root)
    for folder, project in members.items():
        if (project["name"], project["version"]) != (folder, wanted):
            yield f"one-version: {folder} is {project['name']} {project['version']}, the workspace {wanted}"
        extras = project.get("optional-dependencies", {}).values()
        for requirement in (*project["dependencies"], *(line for extra in extras for line in extra)):
            name = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
            if name in members and not requirement.endswith(f"=={wanted}"):
                yield f"one-version: {folder}: {requirement!r} is not pinned to =={wanted}"


if __name__ == "__main__":
    sys.exit(main())
