"""Find what a change affects: changed packages, packages that depend on them, and tests that name these."""

from __future__ import annotations

import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"\baccel(?:_[a-z]+)?\b")
EVERYWHERE = ("uv.lock", "pyproject.toml", "packages/conftest.py", "tests-integration/conftest.py", ".ci/")
"""A change here can touch everything, as can one of the harness and of the tools that tests use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affected:
    """What has to be tested.

    Args:
        packages: Folders in `packages` whose own tests can have another result.
        integration: Files and folders of `tests-integration`, without the documentation's examples.
        sources: Whether something that is shipped has changed.
        documentation: Whether an example of the documentation can have another result.
        everything: Whether all of that, because something has changed that all tests stand on.
    """

    packages: tuple[str, ...]
    integration: tuple[str, ...]
    sources: bool
    documentation: bool
    everything: bool = False


def changed_since(reference: str) -> list[str]:
    """The files that differ from the common ancestor of a commit and this one, untracked ones included.

    Raises:
        ValueError: There is no such commit.
    """
    base = _git("merge-base", reference, "HEAD")
    return sorted({*_git("diff", "--name-only", *base), *_git("ls-files", "--others", "--exclude-standard")})


def affected_by(changed: Iterable[str], root: Path = ROOT) -> Affected:
    """What files can touch.

    Args:
        changed: Their paths, relative to the root.
        root: The workspace.
    """
    files = [*changed]
    above = dependents(root)
    folders = {file.split("/")[1] for file in files if file.startswith("packages/") and file.count("/") > 1}
    shipped = {folder for folder in folders & {*above} if any(_is_shipped(file, folder) for file in files)}
    reached = shipped.union(*(above[folder] for folder in shipped))
    everything = any(file.startswith((*EVERYWHERE, "tests-integration/harness/", "tools/")) for file in files)
    modules = {import_name(root, folder) for folder in reached}
    tests = sorted(
        path.relative_to(root).as_posix() for path in root.glob("tests-integration/*/**/test_*.py")
    )
    own = {file.rpartition("/")[0] for file in files if file.startswith("tests-integration/")}
    return Affected(
        packages=tuple(sorted(reached | (folders & {*above}))),
        integration=tuple(
            test
            for test in tests
            if not test.startswith("tests-integration/docs/")
            and (any(test.startswith(f"{folder}/") for folder in own) or _names(root / test, modules))
        ),
        sources=bool(shipped),
        documentation=bool(shipped) or any(file.endswith(".md") for file in files),
        everything=everything,
    )


def dependents(root: Path = ROOT) -> Mapping[str, frozenset[str]]:
    """Every package's folder, to the folders of all packages that depend on it, directly or not."""
    needs: dict[str, set[str]] = {}
    for path in sorted(root.glob("packages/*/pyproject.toml")):
        lines = tomllib.loads(path.read_text())["project"]["dependencies"]
        needs[path.parent.name] = {re.split(r"[^\w-]", line)[0] for line in lines}

    def above(name: str) -> frozenset[str]:
        direct = {other for other, needed in needs.items() if name in needed}
        return frozenset(direct).union(*(above(other) for other in direct))

    return {name: above(name) for name in needs}


def import_name(root: Path, folder: str) -> str:
    """The module that a package ships."""
    return next(path.name for path in (root / "packages" / folder / "src").iterdir() if path.is_dir())


def _is_shipped(file: str, folder: str) -> bool:
    start = f"packages/{folder}/"
    return file.startswith((f"{start}src/", f"{start}pyproject.toml", f"{start}examples/"))


def _names(path: Path, modules: set[str]) -> bool:
    named = {*NAMED.findall(path.read_text())}
    return bool(modules) and (not named or bool(named & modules))


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.split("\n")[:-1]
