"""Install each wheel alone, with its declared dependencies, into an empty environment; test it there.

Our own wheels are passed as files, so that no package of the same name can come from a registry; everything
else has the versions of uv.lock. Every module is imported, and the examples of the package's README run, so
that a package that imports what it does not declare fails here. With `--tests` its own tests run, too.

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
from pathlib import Path
from queue import Queue

from house_rules import NAME, ROOT, projects

UV = os.environ.get("UV") or shutil.which("uv") or "uv"
AT_ONCE = 2
TEST_TOOLS = ("pytest", "hypothesis", "psutil", "safetensors")
# Imports every module but `__main__`s, which run when imported. One whose own first lines import a library of
# an extra is not imported: nothing imports it where that is not installed.
IMPORT_ALL = """\
import importlib, pkgutil, re, sys, traceback
from importlib.metadata import requires
extras = {re.match(r"[\\w-]+", line)[0] for line in requires(sys.argv[2]) or () if "extra ==" in line}
package = importlib.import_module(sys.argv[1])
names = [m.name for m in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]
for name in [name for name in names if not name.endswith(".__main__")]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if error.name.partition(".")[0] not in extras or frame.f_globals["__name__"] != name:
            raise
        print(f"not without an extra: {name}")
"""
RUN_ALL = """\
import json, sys
for number, code in enumerate(json.loads(sys.argv[1]), 1):
    exec(compile(code, f"example {number}", "exec"), {"__name__": "__main__"})
"""
EXAMPLE = re.compile(r"^```(python|bash)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OURS = re.compile(r"^ *(?:from|import) (accel\w*)", re.MULTILINE)


def main(argv: list[str] | None = None) -> int:
    """Check the chosen packages, all by default; return 1 if any fails."""
    packages = [*projects(ROOT)]
    parser = argparse.ArgumentParser(description="Install and test each wheel alone.")
    parser.add_argument("package", nargs="*", help="distribution names; all by default")
    parser.add_argument("--tests", action="store_true", help="run each package's own tests, too")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.package) - {*packages}:
        parser.error(f"no package is called {', '.join(sorted(unknown))}; there are {', '.join(packages)}")
    chosen: list[str] = arguments.package or packages
    with tempfile.TemporaryDirectory(prefix="isolation", dir=folder_near_cache()) as name:
        folder, benches = Path(name), Queue[Path]()
        for number in range(AT_ONCE):
            benches.put(folder / f"bench{number}")
        build = ("build", "--all-packages", "--wheel", "--quiet", "--out-dir", str(folder / "wheels"))
        subprocess.run([UV, *build], cwd=ROOT, check=True)
        export = ("export", "--frozen", "--group=dev", "--no-hashes", "--no-emit-workspace", "--quiet")
        constraints = ("--output-file", str(folder / "constraints.txt"))
        subprocess.run([UV, *export, *constraints], cwd=ROOT, check=True)

        def check_on_a_bench(package: str) -> bool:
            bench = benches.get()  # the same path for several packages, so that bytecode serves all
            try:
                return check(package, folder, bench, with_tests=arguments.tests)
            finally:
                benches.put(bench)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            passed = [*pool.map(check_on_a_bench, chosen)]
    return int(not all(passed))


def folder_near_cache() -> Path | None:
    """A folder on the file system of uv's cache, so that torch is linked and not copied."""
    done = subprocess.run([UV, "cache", "dir", "--color=never"], capture_output=True, text=True, check=True)
    cache = Path(done.stdout.strip())
    cache.mkdir(parents=True, exist_ok=True)
    folders = (Path(tempfile.gettempdir()), ROOT / "build")
    (ROOT / "build").mkdir(exist_ok=True)
    return next((folder for folder in folders if folder.stat().st_dev == cache.stat().st_dev), None)


def needed(package: str) -> list[str]:
    """A package and, transitively, the members that it declares."""
    members, found = projects(ROOT), [package]
    for name in found:
        names = [match[0] for line in members[name]["dependencies"] if (match := NAME.match(line))]
        found += [other for other in names if other in members and other not in found]
    return found


def check(package: str, folder: Path, bench: Path, *, with_tests: bool) -> bool:
    """Install a package, import and try it; print what was said and how it went."""
    python, members, readme = bench / "bin" / "python", needed(package), ROOT / "packages" / package
    modules = {name: next((ROOT / "packages" / name / "src").iterdir()).name for name in members}
    wheels = [str(next((folder / "wheels").glob(f"{name.replace('-', '_')}-*.whl"))) for name in members]
    found = EXAMPLE.findall((readme / "README.md").read_text())
    examples = [
        code for kind, code in found if kind == "python" and {*OURS.findall(code)} <= {*modules.values()}
    ]
    lines = [line.split() for kind, code in found if kind == "bash" for line in code.splitlines()]
    install = ("pip", "install", "--quiet", "--python", python, "-c", folder / "constraints.txt")
    steps: list[tuple[str, list[str | Path]]] = [
        ("it does not install", [UV, "venv", "--clear", "--quiet", "--python", sys.executable, bench]),
        ("it does not install", [UV, *install, *wheels, *TEST_TOOLS]),
        ("a module does not import", [python, "-W", "error", "-c", IMPORT_ALL, modules[package], package]),
        ("an example of its README fails", [python, "-c", RUN_ALL, json.dumps(examples)]),
        *(("a command of its README fails", [*line]) for line in lines),
    ]
    if with_tests:
        ini = write_tests(package, folder)
        steps.append(("its tests fail", [python, "-m", "pytest", "-c", ini, "-m", "not gpu", ini.parent]))
    hidden = ("PYTEST_", "ACCELERATE_", "PYTHONPATH", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)} | {
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "PATH": os.pathsep.join([str(bench / "bin"), os.environ.get("PATH", "")]),
        "OMP_NUM_THREADS": "1",  # as many processes as benches compute at once
    }
    started, log = time.monotonic(), folder / f"{package}.log"
    complaint = "ok"
    with log.open("w") as output:
        for what, command in steps:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                check=False,
            )  # fmt: skip
            if done.returncode:
                complaint = what
                break
    print(f"{log.read_text()}{package}: {complaint} ({time.monotonic() - started:.1f} s)", flush=True)
    return complaint == "ok"


def write_tests(package: str, folder: Path) -> Path:
    """Copy the tests of a package out of the workspace; return their configuration, with its rules."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    copied = folder / package
    shutil.copytree(
        ROOT / "packages" / package / "tests", copied, ignore=shutil.ignore_patterns("__pycache__")
    )
    rules = {
        name: "".join(f"\n    {line}" for line in options[name]) for name in ("filterwarnings", "markers")
    }
    addopts = "--import-mode=importlib --strict-markers -q -p no:cacheprovider"
    lines = ("[pytest]", f"addopts = {addopts}", *(f"{name} ={value}" for name, value in rules.items()))
    (copied / "pytest.ini").write_text("\n".join(lines) + "\n")
    return copied / "pytest.ini"


if __name__ == "__main__":
    sys.exit(main())
