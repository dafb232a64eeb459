"""Run a function of a script on the chips of a TPU; the only importer of torch_xla in the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from accel_cli.launch.launchers import PER_HOST
from accel_state.errors import MissingDependencyError, SettingsError


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> int:
    """Import the script, and run its function, in processes that torch_xla starts or in this one.

    Args:
        arguments: `PER_CHIP` or `PER_HOST`, the name of the function, optionally `-m`, the script or module,
            and its arguments.
        load: Imports a module.

    Returns:
        0; errors are raised.
    """
    processes, function, *words = arguments
    is_module = words[:1] == ["-m"] and bool(words.pop(0))
    try:
        xla = load("torch_xla")
    except ImportError:
        raise _explain_import_error() from None
    sys.argv[:] = words
    module = load(words[0]) if is_module else _import_script(Path(words[0]))
    if not hasattr(module, function):
        raise SettingsError(
            f"{words[0]} has no function {function!r} to run: pass another with --main_training_function."
        )
    target: Callable[[], object] = getattr(module, function)
    if processes == PER_HOST:
        target()
    else:
        xla.launch(partial(_call_without_index, target))
    return 0


def _import_script(script: Path) -> Any:
    spec = spec_from_file_location(script.stem, script)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{str(script)!r} is not a Python script.")
    sys.path.insert(0, str(script.resolve().parent))
    module = module_from_spec(spec)
    sys.modules[script.stem] = module
    spec.loader.exec_module(module)
    return module


def _call_without_index(function: Callable[[], object], index: int) -> None:
    """Call a function without the index that torch_xla passes; a lambda could not be pickled."""
    del index
    function()


def _explain_import_error() -> MissingDependencyError:
    """Create the error for a torch_xla that is absent, or was built for another torch."""
    try:
        versions = version("torch"), version("torch_xla")
        import_module("accel_state.xla_devices").check_versions(*versions)  # imports torch
    except MissingDependencyError as mismatch:
        return mismatch
    except PackageNotFoundError:
        pass
    return MissingDependencyError(
        "training on a TPU needs torch_xla: install the version that matches torch."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
