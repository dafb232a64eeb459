"""Install each wheel alone, with its declared dependencies, into an empty environment; test it there.

Our own wheels are passed as files, so that no package of the same name can come from a registry; everything
else has the versions of uv.lock. Every module is imported, and the Python examples of the package's README
run, so that a package that imports a sibling that it does not declare fails here. With `--tests` its own
tests and the examples of its guide run, too.

    uv run tools/check_isolation.py [--tests] [PACKAGE ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
UV = os.environ.get("UV") or shutil.which("uv") or "uv"
BENCHES = 2  # packages that are checked at the same time
TEST_TOOLS = ("pytest", "hypothesis", "safetensors")
PYTEST_INI = """\
[pytest]
addopts = --import-mode=importlib --strict-markers -q -p no:cacheprovider
filterwarnings =
    error
    ignore:invalid escape sequence
    ignore:Warning. Profiler clears events
markers =
    gpu: needs an accelerator
    slow: compiles or starts many processes
    thorough: too slow for every commit
"""
# Imports every module but `__main__`s, which run when imported. One whose own first lines import a library of
# an extra is left out: nothing imports it where that is not installed.
IMPORT_ALL = """\
import importlib, pkgutil, re, sys, traceback
from importlib.metadata import requires
extras = {re.match(r"[\\w-]+", line)[0] for line in requires(sys.argv[2]) or () if "extra ==" in line}
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
names = [name for name in names if not name.endswith(".__main__")]
left_out = []
for name in names:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if error.name.partition(".")[0] not in extras or frame.f_globals["__name__"] != name:
            raise
        left_out.append(name)
print(f"{1 + len(names) - len(left_out)} modules imported", *left_out and ["but for an extra:", *left_out])
"""
EXAMPLE = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"^ *(?:from|import) (accel\w*)", re.MULTILINE)
GUIDES = {"accel-bigmodel": "big_models"}
"""Pages of the documentation that are about one package, and import it alone."""
RUN_ALL = """\
import json, sys
for number, code in enumerate(json.loads(sys.argv[1]), 1):
    exec(compile(code, f"example {number}", "exec"), {"__name__": "__main__"})
print(f"{len(json.loads(sys.argv[1]))} examples ran")
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

    def examples(self, language: str, *, with_guide: bool) -> list[str]:
        """Return the examples of its README and, if asked for, those of its guide."""
        pages = [PACKAGES / self.name / "README.md"]
        if with_guide and self.name in GUIDES:
            pages.append(PACKAGES / "accel-suite" / "docs" / "guides" / f"{GUIDES[self.name]}.md")
        found = [match for page in pages for match in EXAMPLE.findall(page.read_text())]
        return [code for written_in, code in found if written_in == language]


def main(argv: list[str] | None = None) -> int:
    """Check the chosen packages, all by default; return 1 if any fails."""
    parser = argparse.ArgumentParser(description="Install and test each wheel alone.")
    parser.add_argument("package", nargs="*", help="distribution names; all by default")
    parser.add_argument("--tests", action="store_true", help="run each package's own tests, too")
    arguments = parser.parse_args(argv)
    chosen: list[str] = arguments.package
    packages = members()
    if unknown := sorted(set(chosen) - set(packages)):
        parser.error(f"no package is called {', '.join(unknown)}; there are {', '.join(packages)}")
    with tempfile.TemporaryDirectory(prefix="isolation", dir=folder_near_cache()) as folder:
        workshop = Workshop(Path(folder), packages, tests=arguments.tests)
        with ThreadPoolExecutor(BENCHES) as pool:
            running = [pool.submit(workshop.check, packages[name]) for name in chosen or packages]
            passed = [one.result() for one in running]
    return int(not all(passed))


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


def folder_near_cache() -> Path | None:
    """A folder on the file system of uv's cache, so that torch is linked and not copied."""
    done = subprocess.run([UV, "cache", "dir", "--color=never"], capture_output=True, text=True, check=True)
    cache = Path(done.stdout.strip())
    cache.mkdir(parents=True, exist_ok=True)
    folders = (Path(tempfile.gettempdir()), ROOT / "build")
    (ROOT / "build").mkdir(exist_ok=True)
    return next((folder for folder in folders if folder.stat().st_dev == cache.stat().st_dev), None)


class Workshop:
    """The wheels, the locked versions, and a few benches: environments built anew for each package.

    A bench always has the same path: compiled bytecode, kept outside of it, then serves all its packages, and
    by links those of the other benches.
    """

    def __init__(self, folder: Path, packages: dict[str, Package], *, tests: bool) -> None:
        self.folder = folder
        self.packages = packages
        self.tests = tests
        self.benches = Queue[Path]()
        self.bytecode = folder / "bytecode"
        first = self.bytecode.joinpath(*folder.absolute().parts[1:], "bench0")
        first.mkdir(parents=True)
        for number in range(BENCHES):
            self.benches.put(folder / f"bench{number}")
            if number:
                first.with_name(f"bench{number}").symlink_to(first)
        self.constraints = folder / "constraints.txt"
        started = time.monotonic()
        uv("build", "--all-packages", "--wheel", "--quiet", "--out-dir", str(folder / "wheels"))
        lock = (
            "--frozen",
            "--group=dev",
            "--no-hashes",
            "--no-emit-workspace",
            "--quiet",
            "--output-file",
            str(self.constraints),
        )
        uv("export", *lock)
        built = sorted(path.name for path in (folder / "wheels").glob("*.whl"))
        print(f"built {len(built)} wheels ({time.monotonic() - started:.1f} s)", flush=True)

    def check(self, package: Package) -> bool:
        """Install a package, import and try it; print what was said and how it went."""
        bench = self.benches.get()
        started = time.monotonic()
        output = self.folder / f"{package.name}.log"
        try:
            complaint = self.complaint(package, bench, output)
        finally:
            self.benches.put(bench)
        report = f"{package.name}: {complaint or 'ok'} ({time.monotonic() - started:.1f} s)"
        print(f"{output.read_text()}{report}", flush=True)
        return complaint is None

    def complaint(self, package: Package, bench: Path, output: Path) -> str | None:
        """What goes wrong first with a package on its own, or None."""
        with output.open("w") as log:
            if self.install(package, bench, log):
                return "it does not install"
            if self.run(
                bench, log, self.folder, "-W", "error", "-c", IMPORT_ALL, package.module, package.name
            ):
                return "a module does not import"
            if self.run(bench, log, self.folder, "-c", RUN_ALL, json.dumps(self.examples(package))):
                return "an example of its pages fails"
            if any(self.execute(bench, log, self.folder, *line) for line in self.commands(package)):
                return "a command of its README fails"
            if not self.tests or not package.tests.is_dir():
                return None
            copied = self.folder / package.name
            shutil.copytree(package.tests, copied / "tests", ignore=shutil.ignore_patterns("__pycache__"))
            (copied / "pytest.ini").write_text(PYTEST_INI)
            failed = self.run(bench, log, copied, "-m", "pytest", "-m", "not gpu", "tests")
            return "its tests fail" if failed else None

    def install(self, package: Package, bench: Path, log: IO[str]) -> int:
        """Make the environment: the package, the members it declares with theirs, the tools of its tests."""
        python = str(bench / "bin" / "python")
        wheels = [str(self.wheel(name)) for name in self.needed(package)]
        install = ("pip", "install", "--quiet", "--python", python, "--constraints", str(self.constraints))
        made = subprocess.run(
            [UV, "venv", "--clear", "--quiet", "--python", sys.executable, str(bench)],
            stderr=log,
            check=False,
        )
        return (
            made.returncode
            or subprocess.run(
                [UV, *install, *wheels, *TEST_TOOLS], cwd=ROOT, stderr=log, check=False
            ).returncode
        )

    def examples(self, package: Package) -> list[str]:
        """Return the Python examples that need no member but those that the package declares."""
        known = {self.packages[name].module for name in self.needed(package)}
        found = package.examples("python", with_guide=self.tests)
        return [code for code in found if {*OURS.findall(code)} <= known]

    def commands(self, package: Package) -> list[list[str]]:
        """Return the lines of its shell examples."""
        return [
            line.split()
            for block in package.examples("bash", with_guide=False)
            for line in block.splitlines()
        ]

    def needed(self, package: Package) -> list[str]:
        """A package and, transitively, the members that it declares."""
        found = [package.name]
        for name in found:
            found += [sibling for sibling in self.packages[name].siblings if sibling not in found]
        return found

    def wheel(self, name: str) -> Path:
        """The wheel of a member."""
        return next((self.folder / "wheels").glob(f"{name.replace('-', '_')}-*.whl"))

    def run(self, bench: Path, log: IO[str], cwd: Path, *arguments: str) -> int:
        """Run a bench's Python, away from the workspace; return its exit status."""
        return self.execute(bench, log, cwd, str(bench / "bin" / "python"), *arguments)

    def execute(self, bench: Path, log: IO[str], cwd: Path, *command: str) -> int:
        """Run a command with a bench's programs first on the path; return its exit status."""
        hidden = ("PYTEST_", "ACCELERATE_", "PYTHONPATH", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        environment["PYTHONPYCACHEPREFIX"] = str(self.bytecode)
        environment["PATH"] = os.pathsep.join([str(bench / "bin"), environment.get("PATH", "")])
        environment["OMP_NUM_THREADS"] = "1"  # as many processes as benches compute at once
        return subprocess.run(
            command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        ).returncode


def uv(*arguments: str) -> None:
    """Run uv in the workspace; its own words are the error."""
    subprocess.run([UV, *arguments], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
