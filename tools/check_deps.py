"""Check that each package declares what it imports, and imports what it declares.

Counts imports for type checkers too, and the modules named in export tables. Optional libraries may be
imported if an extra of the package names them. The metapackage declares every other member below it.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
METAPACKAGE = "accel-suite"


def main() -> int:
    """Print what is declared and not imported, or imported and not declared; return 1 if anything is."""
    projects = {
        path.parent: tomllib.loads(path.read_text())["project"]
        for path in sorted(PACKAGES.glob("*/pyproject.toml"))
    }
    members = {
        project["name"]
        for project in projects.values()
        if METAPACKAGE not in names_of(project["dependencies"])
    }
    ours = {next(folder.glob("src/*")).name: [project["name"]] for folder, project in projects.items()}
    distributions = {**packages_distributions(), **ours}
    complaints = [
        f"{project['name']} {complaint}"
        for folder, project in projects.items()
        for complaint in compare(project, imported(folder, distributions), members)
    ]
    for complaint in complaints:
        print(complaint)
    print(f"{len(projects)} packages, {len(complaints)} complaints")
    return int(bool(complaints))


def compare(project: dict[str, Any], used: set[str], members: set[str]) -> Iterator[str]:
    """How a package's imports differ from its declared dependencies."""
    declared = names_of(project["dependencies"])
    optional = names_of(line for extra in project.get("optional-dependencies", {}).values() for line in extra)
    for name in sorted(used - declared - optional - {project["name"]}):
        yield f"imports {name} and does not declare it"
    if project["name"] == METAPACKAGE:
        used = members - {METAPACKAGE}
        yield from (f"does not declare {name}" for name in sorted(used - declared))
    for name in sorted(declared - used):
        yield f"declares {name} and does not import it"


def names_of(requirements: Iterable[str]) -> set[str]:
    """The normalised distribution names of requirements.

    Example:
        >>> sorted(names_of(["torch>=2.9", "PyYAML ; extra == 'x'", "a_b[c]==1"]))
        ['a-b', 'pyyaml', 'torch']
    """
    return {canonicalize_name(Requirement(line).name) for line in requirements}


def imported(folder: Path, distributions: dict[str, list[str]]) -> set[str]:
    """The distributions that a package's modules import."""
    found: set[str] = set()
    for path in (*folder.glob("src/**/*.py"), *folder.glob("src/**/*.pyi")):
        for module in roots(ast.parse(path.read_text())):
            if module not in sys.stdlib_module_names:
                found.add(canonicalize_name(distributions.get(module, [module])[0]))
    return found


def roots(tree: ast.Module) -> Iterator[str]:
    """The top-level modules that a file imports or names in a table."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]
            case ast.keyword(arg="module", value=ast.Constant(value=str(module))):  # a row of a table
                yield module.partition(".")[0]
            case _:
                pass


if __name__ == "__main__":
    sys.exit(main())
