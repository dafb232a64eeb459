"""`torch.distributed.run`, ending as a script does: with the exit code of the worker that failed first.

Started as a program of its own by `accel launch`; this is where torch is imported.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from accel_cli.launch.exit_codes import ERROR
from accel_cli.launch.run_torchrun import WORKER
from accel_cli.launch.signals import Relay, adopt_orphans, end_descendants
from accel_cli.launch.worker_errors import (
    error_of_failure,
    format_all_errors,
    format_errors,
    read_worker_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from accel_cli.launch.worker_errors import WorkerErrors

_OF_SIGNAL = 128  # and its number: the exit code of a shell
_TORCHS_LOG = logging.getLogger("torch.distributed.elastic.multiprocessing.api")
# What torch logs of every failure, and the summary says in its own words.
_ALWAYS_LOGGED = ("Sending process ", "failed (exitcode: ")


def main(arguments: Sequence[str], load: Callable[[str], Any] = import_module) -> int:
    """Run the workers until they are done.

    Args:
        arguments: Those of `torch.distributed.run`, possibly after `--quiet`.
        load: Imports a module of torch.

    Returns:
        0, or the exit code of the worker that failed first, or 128 and the number of the signal that
        ended it, or this process; 2 if nothing was started.
    """
    quiet = arguments[:1] == ["--quiet"]
    try:
        distributed = load("torch.distributed")
        run = load("torch.distributed.run")
        multiprocessing = load("torch.distributed.elastic.multiprocessing")
        signals = load("torch.distributed.elastic.multiprocessing.api")
    except KeyboardInterrupt:  # nothing runs yet
        return _OF_SIGNAL + signal.SIGINT
    relay = Relay(signals.SignalException, quiet=quiet)
    # Torch makes this the handler of signals when it starts the workers; it would give up at a second one.
    signals._terminate_process_handler = relay.end
    adopt_orphans()
    if not quiet:
        _TORCHS_LOG.addFilter(lambda record: not str(record.msg).startswith(_ALWAYS_LOGGED))
    with relay.listening(), TemporaryDirectory(prefix="accel-launch-", ignore_cleanup_errors=True) as folder:
        # A folder that was asked for comes later in the line, and wins.
        args = run.parse_args([f"--log_dir={folder}", *arguments[quiet:]])
        if args.training_script == WORKER:
            args.training_script_args.insert(0, f"--launcher={os.getpid()}")
        try:
            run.run(args)
        except multiprocessing.errors.ChildFailedError as error:
            return _failed(error, quiet=quiet)
        except signals.SignalException as error:
            _write("" if quiet else format_all_errors(read_worker_errors(Path(folder))))
            return _OF_SIGNAL + int(error.sigval)
        except distributed.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            _write(
                f"accel launch: error: another process has taken main_process_port {args.master_port} while "
                "this one started. Choose another, or none for any free port (on one machine).\n"
            )
            return ERROR
    return 0


def _failed(error: Any, *, quiet: bool) -> int:
    """Report what has failed, and return the exit code."""
    errors = {rank: error_of_failure(failure) for rank, failure in error.failures.items()}
    codes: dict[int, int] = {rank: failure.exitcode for rank, failure in error.failures.items()}

    def order(rank: int) -> tuple[bool, float]:
        # As soon as one has failed, torch ends the others with this signal.
        is_ended_by_torch = codes[rank] == -signal.SIGTERM and not errors[rank].trace
        return is_ended_by_torch, errors[rank].time

    first = min(errors, key=order)
    end_descendants([failure.pid for failure in error.failures.values()])
    if not quiet:
        _write(format_errors(errors, first))
    return _exit_code(codes[first], errors[first])


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # the terminal is gone
        pass


def _exit_code(code: int, errors: WorkerErrors) -> int:
    """Return the exit code as a shell reports it; Python has negative ones for signals."""
    if code >= 0:
        return code
    if errors.trace:  # the signal came when its error had decided its exit code already
        return _OF_SIGNAL + signal.SIGINT if errors.interrupted else 1
    return _OF_SIGNAL - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
