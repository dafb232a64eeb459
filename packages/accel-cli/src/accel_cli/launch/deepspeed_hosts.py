"""DeepSpeed's launcher, handing over the variables of settings too. This is where DeepSpeed is imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from accel_cli.launch.ending import run_program
from accel_state.errors import MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> None:
    """Run DeepSpeed's launcher.

    Args:
        arguments: `--export=` and names with commas between, then those of DeepSpeed's launcher.
        load: Imports a module.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """
    exported, *rest = arguments
    try:
        runner = load("deepspeed.launcher.runner")
    except ImportError:
        raise MissingDependencyError("DeepSpeed is not installed: `pip install deepspeed`.") from None
    # It hands over what begins with one of these.
    runner.EXPORT_ENVS += [name for name in exported.removeprefix("--export=").split(",") if name]
    runner.main(rest)


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
