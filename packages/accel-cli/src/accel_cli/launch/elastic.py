"""Torch.distributed.run, ending like a script; signals.

Started as a program of its own by `accel launch`; this is where torch is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import psutil

from accel_cli.launch.launchers import ERROR, WORKER
from accel_train.worker_errors import (
    WorkerErrors,
    error_of_failure,
    format_all_errors,
    format_errors,
    read_worker_errors,
)

_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
_FORWARDED_SIGNALS = ("SIGUSR1", "SIGUSR2")
_SAME = 0.5  # seconds in which several SIGINT count as one Ctrl-C, since a shell and a terminal both send it
_PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_GRACE = 5.0  # seconds in which what is left behind may end by itself
AGAIN = "accel launch: waiting for the processes to end; Ctrl-C ends them at once\n"
"""Printed when a signal asks to end."""


class SignalForwarder:
    """Handler of the signals of this process.

    The first signal that asks to end raises an error, upon which torch sends it to the workers and waits.
    Ctrl-C after that kills them. User signals (SIGUSR1, SIGUSR2) are forwarded.

    Args:
        error: Makes the error from a message and the signal.
        quiet: Do not print that the launcher waits.
    """

    def __init__(self, error: Callable[[str, signal.Signals], Exception], *, quiet: bool = False) -> None:
        self._error = error
        self._quiet = quiet
        self.first: signal.Signals | None = None
        self._again_from = 0.0
        self._workers: list[int] = []
        # By nohup, or a shell that runs this in the background.
        self._ignored = {
            number for number in _numbers(_STOP_SIGNALS) if signal.getsignal(number) == signal.SIG_IGN
        }

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that asks to end: end the workers.

        Raises:
            Exception: The result of `error`, at the first signal.
        """
        del frame
        if number in self._ignored:
            return
        if self.first is not None:
            # A terminal that is closed signals all its processes, and so does its shell.
            if number == signal.SIGINT and time.monotonic() > self._again_from:
                kill(self._workers, getattr(signal, "SIGKILL", signal.SIGTERM))
            return
        self.first, self._again_from = signal.Signals(number), time.monotonic() + _SAME
        self._workers = children()
        if self._workers and not self._quiet:
            with contextlib.suppress(OSError):  # the terminal is gone
                os.write(2, AGAIN.encode())
        raise self._error(f"got {self.first.name}", self.first)

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Handle a user signal: send it to the workers."""
        del frame
        for worker in children():
            with contextlib.suppress(OSError):
                os.kill(worker, number)

    @contextlib.contextmanager
    def listening(self) -> Generator[None]:
        """Install the handlers for the block; after it, kill descendants of workers that a signal ended."""
        handlers = {
            **dict.fromkeys(_numbers(_STOP_SIGNALS), self.end),
            **dict.fromkeys(_numbers(_FORWARDED_SIGNALS), self.forward),
        }
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            end_descendants(self._workers)
            for number, handler in before.items():
                signal.signal(number, handler)


def _numbers(names: Iterable[str]) -> list[signal.Signals]:
    """The signals of these names that this system knows."""
    return [signal.Signals[name] for name in names if name in signal.Signals.__members__]


def adopt_orphans() -> None:
    """Become the parent of processes that lose theirs below this one, so that `end_descendants` finds them.

    Linux only; elsewhere those in a session of their own get away.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(workers: Sequence[int]) -> None:
    """End what workers have started and left behind."""
    if not workers:
        return
    kill(workers, signal.SIGTERM)
    left = psutil.Process().children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, deaf = psutil.wait_procs(left, timeout=_GRACE)
    for process in deaf:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def children() -> list[int]:
    """Return the processes that this one has started and that still run."""
    return [child.pid for child in psutil.Process().children()]


def kill(workers: Iterable[int], number: int) -> None:
    """Send a signal to workers and to what they have started, where each has a process group of its own."""
    for worker in workers:
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                os.kill(worker, number)
            else:
                os.killpg(worker, number)


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
    relay = SignalForwarder(signals.SignalException, quiet=quiet)
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
