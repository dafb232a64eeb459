"""Run a function of a script on the chips of a TPU. This is where torch_xla is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from accel_cli.launch.launchers import ONE, run_program
from accel_state.errors import MissingDependencyError, SettingsError


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> None:
    """Import the script, and run its function: in processes that torch_xla starts, or in this one.

    Args:
        arguments: `EACH` or `ONE`, the function, `-m` or nothing, the script or module, and what it is given.
        load: Imports a module.

    Raises:
        MissingDependencyError: torch_xla is not installed, or does not belong to that of torch.
        SettingsError: The script does not have the function.
    """
    processes, function, *rest = arguments
    is_module = rest[:1] == ["-m"] and bool(rest.pop(0))
    try:
        xla = load("torch_xla")
    except ImportError:
        raise _missing() from None
    sys.argv[:] = rest
    module = load(rest[0]) if is_module else _import(Path(rest[0]))
    if not hasattr(module, function):
        raise SettingsError(
            f"{rest[0]} has no function {function!r} for the processes to run: name another with "
            "--main_training_function."
        )
    start = partial(_call, getattr(module, function))
    if processes == ONE:
        start(0)
    else:
        xla.launch(start)


def _missing() -> MissingDependencyError:
    """Return the error for a torch_xla that is absent, or was built for another torch."""
    try:
        found = version("torch"), version("torch_xla")
        import_module("accel_state.xla_devices").check_versions(*found)
    except MissingDependencyError as mismatch:
        return mismatch
    except PackageNotFoundError:
        pass
    return MissingDependencyError(
        "training on a TPU needs torch_xla: install the version that belongs to that of torch."
    )


def _call(function: Callable[[], object], index: int) -> None:
    """Call a function without the index that torch_xla passes."""
    del index
    function()


def _import(script: Path) -> Any:
    spec = spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{str(script)!r} is no Python script.")
    sys.path.insert(0, str(script.resolve().parent))
    module = module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(run_program(main, sys.argv[1:]))
