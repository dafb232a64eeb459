"""Install each wheel alone, with its declared dependencies, into an empty environment; test it there.

Our own wheels are passed as files, so that no package of the same name can come from a registry; everything
else has the versions of uv.lock. Every module is imported and the package's own tests run, so that a package
that imports a sibling that it does not declare fails here.

    uv run tools/check_isolation.py [PACKAGE ...]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
TEST_TOOLS = ("pytest", "hypothesis")
PYTEST_INI = """\
[pytest]
addopts = --import-mode=importlib --strict-markers -q -p no:cacheprovider
filterwarnings = error
markers =
    gpu: needs an accelerator
    slow: compiles or starts many processes
"""
# Imports every module but `__main__`s, which run when imported.
IMPORT_ALL = """\
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
names = [name for name in names if not name.endswith(".__main__")]
for name in names:
    importlib.import_module(name)
print(f"{1 + len(names)} modules imported")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A member of the workspace: its distribution and import names, and the members that it declares."""

    name: str
    module: str
    siblings: tuple[str, ...]

    @property
    def tests(self) -> Path:
        """Its unit tests."""
        return PACKAGES / self.name / "tests"


def main(argv: list[str] | None = None) -> int:
    """Check the chosen packages, all by default; return 1 if any fails."""
    parser = argparse.ArgumentParser(description="Install and test each wheel alone.")
    parser.add_argument("package", nargs="*", help="distribution names; all by default")
    chosen: list[str] = parser.parse_args(argv).package
    packages = members()
    if unknown := sorted(set(chosen) - set(packages)):
        parser.error(f"no package is called {', '.join(unknown)}; there are {', '.join(packages)}")
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="isolation", dir=beside_the_cache()) as folder:
        workshop = Workshop(Path(folder), packages)
        for name in chosen or packages:
            started = time.monotonic()
            complaint = workshop.check(packages[name])
            print(f"{name}: {complaint or 'ok'} ({time.monotonic() - started:.1f} s)", flush=True)
            failed += [name] if complaint else []
    return int(bool(failed))


def members() -> dict[str, Package]:
    """The workspace's packages by distribution name."""
    projects = {
        path.parent: tomllib.loads(path.read_text())["project"]
        for path in sorted(PACKAGES.glob("*/pyproject.toml"))
    }
    names = {project["name"] for project in projects.values()}
    return {
        project["name"]: Package(
            name=project["name"],
            module=next((folder / "src").iterdir()).name,
            siblings=tuple(sorted(names & {line.partition("==")[0] for line in project["dependencies"]})),
        )
        for folder, project in projects.items()
    }


def beside_the_cache() -> Path | None:
    """A folder on the file system of uv's cache, so that torch is linked and not copied."""
    told = subprocess.run([UV, "cache", "dir", "--color=never"], capture_output=True, text=True, check=True)
    cache = Path(told.stdout.strip())
    cache.mkdir(parents=True, exist_ok=True)
    places = (Path(tempfile.gettempdir()), ROOT / "build")
    (ROOT / "build").mkdir(exist_ok=True)
    return next((place for place in places if place.stat().st_dev == cache.stat().st_dev), None)


class Workshop:
    """The wheels, the locked versions, and one environment that is built anew for each package.

    The environment always has the same path: compiled bytecode, kept outside of it, then serves all packages.
    """

    def __init__(self, folder: Path, packages: dict[str, Package]) -> None:
        self.folder = folder
        self.packages = packages
        self.python = folder / "environment" / "bin" / "python"
        self.constraints = folder / "constraints.txt"
        started = time.monotonic()
        uv("build", "--all-packages", "--wheel", "--quiet", "--out-dir", str(folder / "wheels"))
        lock = (
            "--frozen",
            "--no-hashes",
            "--no-emit-workspace",
            "--quiet",
            "--output-file",
            str(self.constraints),
        )
        uv("export", *lock)
        built = sorted(path.name for path in (folder / "wheels").glob("*.whl"))
        print(f"built {len(built)} wheels ({time.monotonic() - started:.1f} s)", flush=True)

    def check(self, package: Package) -> str | None:
        """Install a package, import all of it, run its tests; say what went wrong first, or None."""
        self.install(package)
        if self.run("-W", "error", "-c", IMPORT_ALL, package.module):
            return "a module does not import"
        if not package.tests.is_dir():
            return None
        tests = self.folder / package.name
        shutil.copytree(package.tests, tests / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        (tests / "pytest.ini").write_text(PYTEST_INI)
        return "its tests fail" if self.run("-m", "pytest", "-m", "not gpu", "tests", cwd=tests) else None

    def install(self, package: Package) -> None:
        """Make the environment: the package, the members it declares with theirs, the tools of its tests."""
        uv("venv", "--clear", "--quiet", "--python", sys.executable, str(self.python.parents[1]))
        wheels = [str(self.wheel(name)) for name in self.needed(package)]
        uv(
            "pip", "install", "--quiet", "--python", str(self.python), "--constraints", str(self.constraints),
            *wheels, *TEST_TOOLS,
        )  # fmt: skip

    def needed(self, package: Package) -> list[str]:
        """A package and, transitively, the members that it declares."""
        found = [package.name]
        for name in found:
            found += [sibling for sibling in self.packages[name].siblings if sibling not in found]
        return found

    def wheel(self, name: str) -> Path:
        """The wheel of a member."""
        return next((self.folder / "wheels").glob(f"{name.replace('-', '_')}-*.whl"))

    def run(self, *arguments: str, cwd: Path | None = None) -> int:
        """Run the environment's Python, away from the workspace; return its exit status."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "ACCELERATE_"))
        }
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            kept.pop(name, None)
        kept["PYTHONPYCACHEPREFIX"] = str(self.folder / "bytecode")
        kept["PATH"] = os.pathsep.join([str(self.python.parent), kept.get("PATH", "")])
        command = [str(self.python), *arguments]
        return subprocess.run(command, cwd=cwd or self.folder, env=kept, check=False).returncode


def uv(*arguments: str) -> None:
    """Run uv in the workspace; its own words are the error."""
    subprocess.run([UV, *arguments], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
