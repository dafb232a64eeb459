"""`torch.distributed.run`, ending as a script does: with the exit code of the worker that failed first.

Started as a program of its own by `accel launch`; this is where torch is imported.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
        rank, failure = error.get_first_failure()
        if not quiet:
            sys.stderr.write(tell(error.failures, rank))
        return _exit_code(cast("int", failure.exitcode))
    except signals.SignalException as error:
        return _exit_code(-int(error.sigval))
    return 0


def tell(failures: Mapping[int, Any], first: int) -> str:
    """What happened: a line for each rank that failed, and last the traceback of the one that failed first.

    Args:
        failures: What torch noted, by rank.
        first: The rank that failed first.
    """
    others = [_line(rank, failure) for rank, failure in sorted(failures.items()) if rank != first]
    trace = _trace(failures[first])
    return "\n".join([*others, _line(first, failures[first]), *([trace.rstrip()] if trace else []), ""])


def _line(rank: int, failure: Any) -> str:
    if failure.exitcode < 0:
        how = f"was ended by {signal.Signals(-failure.exitcode).name}"
    elif _trace(failure):
        how = f"failed with {_summary(failure)}"
    else:
        how = f"ended with exit code {failure.exitcode}"
    return f"accel launch: rank {rank} {how}"


def _summary(failure: Any) -> str:
    """The first line of what the error says."""
    return str(failure.error_file_data["message"].get("message", "an error")).partition("\n")[0]


def _trace(failure: Any) -> str:
    """The traceback that the worker wrote down, if it did."""
    data = failure.error_file_data
    message = data.get("message") if isinstance(data, dict) else None
    details = message.get("extraInfo") if isinstance(message, dict) else None
    return str(details.get("py_callstack", "")) if isinstance(details, dict) else ""


def _exit_code(code: int) -> int:
    """As a shell reports it: a process that a signal ended has a negative code in Python."""
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
