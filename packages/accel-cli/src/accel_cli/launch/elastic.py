"""Run torch.distributed.run with the signal handling, tracebacks and exit code of a plain script."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from types import FrameType
from typing import Any

import psutil
from torch.distributed import DistNetworkError, run
from torch.distributed.elastic.multiprocessing import SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from accel_cli.launch.launchers import STOP_SIGNALS, WORKER, handle_signals
from accel_cli.launch.worker import EXIT_CODE_FILE
from accel_cli.main import ERROR
from accel_state.platforms import adopt_orphans, signal_group
from accel_train.worker_errors import error_of_failure, format_all_errors, format_errors, read_worker_errors


def main(arguments: Sequence[str]) -> int:
    """Run the workers until they exit.

    Args:
        arguments: The arguments of `torch.distributed.run`, optionally after `--quiet`.

    Returns:
        0, the exit code of the worker that failed first, 128 plus the number of the signal that ended it or
        this process, or 2 if no worker was started.
    """
    # 1. Handle signals. Torch installs this handler when it starts the workers; torch's handler would leave
    # them running at a second signal.
    quiet = arguments[:1] == ["--quiet"]
    forwarder = SignalForwarder(SignalException, quiet=quiet)
    api._terminate_process_handler = forwarder.end
    adopt_orphans()  # to find them at the end
    if not quiet:
        _TORCH_LOGGER.addFilter(lambda record: not str(record.msg).startswith(_IN_SUMMARY))
    # 2. Run the workers, and report failures. A --log_dir of the user comes later, and takes precedence.
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    named = {option.partition("=")[0] for option in options}
    is_retained = "--tee" in named and "--log_dir" not in named  # as torch does
    folders = (
        contextlib.nullcontext(mkdtemp(prefix="torchelastic_"))
        if is_retained
        else TemporaryDirectory(prefix="accel-launch-", ignore_cleanup_errors=True)
    )
    with forwarder.install(), folders as folder:
        if is_retained and not quiet:
            _write(f"accel launch: the output of the processes is also written to {folder}\n")
        args = run.parse_args([f"--log_dir={folder}", *arguments[quiet:]])
        if args.training_script == WORKER:
            args.training_script_args.insert(0, f"--launcher={os.getpid()}")
        try:
            run.run(args)
        except ChildFailedError as error:
            return _report_failure(error, quiet=quiet)
        except SignalException as error:
            _write("" if quiet else format_all_errors(read_worker_errors(Path(folder))))
            codes = [int(file.read_text(encoding="ascii")) for file in Path(folder).rglob(EXIT_CODE_FILE)]
            if codes and len(codes) == len(forwarder.workers):  # The script has handled the signal.
                return max(codes)
            return _SIGNAL_CODE + int(error.sigval)
        except DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            _write(
                f"accel launch: error: another process took main_process_port {args.master_port} during "
                "startup. Choose another port, or omit it to use any free port (on one machine).\n"
            )
            return ERROR
    return 0


def _report_failure(error: Any, *, quiet: bool) -> int:
    """Print the errors of the workers; return the exit code of the worker that failed first."""
    errors = {rank: error_of_failure(failure) for rank, failure in error.failures.items()}
    codes: dict[int, int] = {rank: failure.exitcode for rank, failure in error.failures.items()}
    # As soon as a worker fails, torch ends the remaining workers with this signal.
    ended_by_torch = {rank: codes[rank] == -signal.SIGTERM and not errors[rank].trace for rank in errors}
    first = min(errors, key=lambda rank: (ended_by_torch[rank], errors[rank].time))
    end_descendants([failure.pid for failure in error.failures.values()])
    if not quiet:
        _write(format_errors(errors, first))
    code = codes[first]
    if code < 0:  # A signal: Python reports it as a negative code.
        if errors[first].trace:  # Its error had set the exit code before the signal.
            return _SIGNAL_CODE + signal.SIGINT if errors[first].interrupted else 1
        return _SIGNAL_CODE - code
    return code


_SIGNAL_CODE = 128
"""The exit code of a shell after a signal, minus the signal's number."""

_TORCH_LOGGER = logging.getLogger("torch.distributed.elastic.multiprocessing.api")

_IN_SUMMARY = ("Sending process ", "failed (exitcode: ")
"""The prefixes of torch's log messages that our summary of a failure replaces."""


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # The terminal may be closed.
        pass


_CTRL_C_SECONDS = 0.5
"""Seconds in which several SIGINT count as one Ctrl-C, since shell and terminal may both send it."""


class SignalForwarder:
    """Signal handler of the launcher process.

    The first termination signal raises an error, upon which torch sends the signal to the workers and waits.
    A later Ctrl-C kills them. User signals (SIGUSR1, SIGUSR2) are forwarded.

    Args:
        error: Creates the error from a message and the signal.
        quiet: Do not print that the launcher is waiting.
        ctrl_c_seconds: Seconds after the first signal in which a SIGINT belongs to the same Ctrl-C.
    """

    def __init__(
        self,
        error: Callable[[str, signal.Signals], Exception],
        *,
        quiet: bool = False,
        ctrl_c_seconds: float = _CTRL_C_SECONDS,
    ) -> None:
        self._error = error
        self._quiet = quiet
        self._ctrl_c_seconds = ctrl_c_seconds
        self.first: signal.Signals | None = None
        self._again_from = 0.0
        self.workers: list[int] = []
        # Signals that nohup, or a shell that runs this in the background, has set to be ignored.
        self._ignored = {number for number in STOP_SIGNALS if signal.getsignal(number) == signal.SIG_IGN}

    def end(self, number: int, frame: FrameType | None) -> None:
        """Handle a termination signal: end the workers."""
        del frame
        if number in self._ignored:
            return
        if self.first is not None:
            # When a terminal closes, it and its shell both signal all processes.
            if number == signal.SIGINT and time.monotonic() > self._again_from:
                kill(self.workers, getattr(signal, "SIGKILL", signal.SIGTERM))
            return
        self.first, self._again_from = signal.Signals(number), time.monotonic() + self._ctrl_c_seconds
        self.workers = children()
        if self.workers and not self._quiet:
            with contextlib.suppress(OSError):  # The terminal may be closed.
                os.write(2, _WAITING.encode())
        raise self._error(f"got {self.first.name}", self.first)

    def forward(self, number: int, frame: FrameType | None) -> None:
        """Handle a user signal: send it to the workers."""
        del frame
        for worker in children():
            with contextlib.suppress(OSError):
                os.kill(worker, number)

    @contextlib.contextmanager
    def install(self) -> Generator[None]:
        """Handle signals within the block; after a signal, end the descendants of the workers."""
        with (
            handle_signals(("SIGINT", "SIGTERM", "SIGHUP"), self.end),
            handle_signals(("SIGUSR1", "SIGUSR2"), self.forward),
        ):
            try:
                yield
            finally:
                end_descendants(self.workers)


_WAITING = "accel launch: waiting for the processes to end. Press Ctrl-C to end them immediately\n"
"""Printed at the first termination signal."""


def end_descendants(workers: Sequence[int]) -> None:
    """End workers and their remaining descendants; except on Linux, not those in another session."""
    if not workers:
        return
    kill(workers, signal.SIGTERM)
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, still_running = psutil.wait_procs(descendants, timeout=_GRACE)
    for process in still_running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


_GRACE = 5.0
"""Grace time in seconds for remaining descendants."""


def children() -> list[int]:
    """Return the ids of the running children of this process."""
    return [child.pid for child in psutil.Process().children()]


def kill(workers: Iterable[int], number: int) -> None:
    """Send a signal to the process groups of workers; on Windows to the workers only."""
    for worker in workers:
        with contextlib.suppress(OSError):
            signal_group(worker, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
