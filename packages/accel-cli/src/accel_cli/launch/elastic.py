"""`torch.distributed.run`, ending as a script does: with the exit code of the worker that failed first.

Started as a program of its own by `accel launch`; this is where torch is imported.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> int:
    """Run the workers until they are done.

    Args:
        arguments: Those of `torch.distributed.run`, possibly after `--quiet`.
        load: Imports a module of torch.

    Returns:
        0, or the exit code of the worker that failed first, or 128 and the number of the signal that
        ended it, or this process.
    """
    quiet = arguments[:1] == ["--quiet"]
    run = load("torch.distributed.run")
    multiprocessing = load("torch.distributed.elastic.multiprocessing")
    signals = load("torch.distributed.elastic.multiprocessing.api")
    try:
        run.main(list(arguments[quiet:]))
    except multiprocessing.errors.ChildFailedError as error:
        if not quiet:
            sys.stderr.write(f"{error}\n")
        _, failure = error.get_first_failure()
        return _exit_code(cast("int", failure.exitcode))
    except signals.SignalException as error:
        return _exit_code(-int(error.sigval))
    return 0


def _exit_code(code: int) -> int:
    """As a shell reports it: a process that a signal ended has a negative code in Python."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
