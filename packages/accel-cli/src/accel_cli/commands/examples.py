"""`accel examples`: copy the example scripts and documentation of accel-suite to a folder."""

from __future__ import annotations

import shutil
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from accel_cli.output import show
from accel_state.errors import MissingDependencyError, SettingsError


def run(options: Namespace) -> int:
    """Copy the examples, with `--docs` also the documentation, and print how to run the first one."""
    target = Path(options.directory).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{str(target)!r} exists and is not empty: choose another folder.")
    try:
        shutil.copytree(find_folder("examples"), target, ignore=_LEFT_OUT, dirs_exist_ok=True)
        if options.docs:
            shutil.copytree(find_folder("docs"), target / "docs", ignore=_LEFT_OUT)
            for page in (target / "docs").rglob("*.md"):  # whose links lead to the scripts in `target`
                page.write_text(page.read_text("utf-8").replace("../../examples/", "../../"), "utf-8")
    except OSError as error:
        raise SettingsError(f"the examples cannot be copied to {str(target)!r}: {error}.") from None
    scripts = len([*target.rglob("*.py")])
    show(
        f"Copied {scripts} scripts to {target}. Most need scikit-learn, some need transformers. To run "
        "the first one:",
        f"accel launch {target / 'digits.py'}",
        *([f"The documentation begins at {target / 'docs' / 'index.md'}."] if options.docs else []),
    )
    return 0


_LEFT_OUT = shutil.ignore_patterns("__pycache__", "api", "src", "conf.py")
"""Files needed only to build the site, and pages that the build generates."""


def find_folder(name: str) -> Path:
    """Return the folder `examples` or `docs`: in the wheel of accel-suite, or in the repository."""
    suite = find_spec("accel")  # a dependent package, which is not imported
    if suite is None or suite.origin is None:
        raise MissingDependencyError(f"the {name} come with accel-suite: `pip install accel-suite`.")
    module = Path(suite.origin).parent
    folders = (module / f"_{name}", module.parents[1] / name)
    return next(folder for folder in folders if folder.is_dir())
