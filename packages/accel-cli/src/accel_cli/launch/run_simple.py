"""One process: the command of `python script`, with the same interpreter."""

from __future__ import annotations

import ast
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from accel_cli.launch.job import Job
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_cli.launch.plan import LaunchPlan


def job(plan: LaunchPlan) -> Job:
    """Return the program to become."""
    if plan.launch.no_python:
        return Job(command=(program(plan), *plan.script_arguments), environ=plan.environ)
    module = ["-m"] if plan.launch.module else []
    line = (sys.executable, *module, plan.script, *plan.script_arguments)
    return Job(command=line, environ=plan.environ)


def program(plan: LaunchPlan) -> str:
    """Return the program that `--no_python` runs, as a shell would find it."""
    found = shutil.which(plan.script, path=plan.environ.get("PATH"))
    if found is None:
        raise SettingsError(f"--no_python: there is no program {plan.script!r} on the path.")
    return found


def worker_line(plan: LaunchPlan, *, aloud: bool) -> list[str]:
    """Return the command line of one of several processes, which shows its own traceback if `aloud`."""
    if plan.launch.no_python:
        return [program(plan), *plan.script_arguments]
    switches = [*(["--aloud"] if aloud else []), *(["-m"] if plan.launch.module else [])]
    return [*switches, plan.script, *plan.script_arguments]


def require_script(plan: LaunchPlan) -> None:
    """Check that the script exists.

    Raises:
        SettingsError: There is not, or it imports accel where only the command is installed.
    """
    if not (plan.launch.module or plan.launch.no_python or Path(plan.script).exists()):
        raise SettingsError(f"there is no script {plan.script!r} to run.")
    script = Path(plan.script)
    own = (script.with_name("accel"), script.with_name("accel.py"))
    if find_spec("accel") is None and not any(path.exists() for path in own) and _imports_accel(script):
        raise SettingsError(
            f"{plan.script!r} imports accel, which is not installed here, only the command is: "
            "`pip install accel-suite`."
        )


def _imports_accel(script: Path) -> bool:
    """Whether a script imports the library at its top level; what is no Python is left to Python."""
    try:
        statements = ast.parse(script.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False
    names = [alias.name for one in statements if isinstance(one, ast.Import) for alias in one.names]
    names += [one.module or "" for one in statements if isinstance(one, ast.ImportFrom) and not one.level]
    return any(name.partition(".")[0] == "accel" for name in names)
