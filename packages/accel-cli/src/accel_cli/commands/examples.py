"""`accel examples`: copy the example scripts that come with accel-suite to a folder."""

from __future__ import annotations

import shutil
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path

from accel_cli.output import show
from accel_state.errors import MissingDependencyError, SettingsError


def run(options: Namespace) -> int:
    """Copy the examples, and print how to run the first one."""
    target = Path(options.directory).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SettingsError(f"{str(target)!r} exists and is not empty: name another folder.")
    try:
        shutil.copytree(
            find_examples(), target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
        )
    except OSError as error:
        raise SettingsError(f"the examples cannot be copied to {str(target)!r}: {error}.") from None
    scripts = len([*target.rglob("*.py")])
    show(
        f"Copied {scripts} scripts to {target}; most need scikit-learn, some transformers. To run the first:",
        f"accel launch {target / 'digits.py'}",
    )
    return 0


def find_examples() -> Path:
    """Return the folder of the examples: in the wheel of accel-suite, or in the repository.

    Raises:
        MissingDependencyError: accel-suite is not installed.
    """
    suite = find_spec("accel")  # it is above this package, and is not imported
    if suite is None or suite.origin is None:
        raise MissingDependencyError("the examples come with accel-suite: `pip install accel-suite`.")
    module = Path(suite.origin).parent
    folders = (module / "_examples", module.parents[1] / "examples")
    return next(folder for folder in folders if folder.is_dir())
