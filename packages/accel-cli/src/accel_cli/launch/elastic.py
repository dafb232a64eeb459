"""`torch.distributed.run`, ending as a script does: with the exit code of the worker that failed first.

Started as a program of its own by `accel launch`; this is where torch is imported.
"""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from accel_cli.launch.last_words import tell, tell_all, words_in, words_of_failure
from accel_cli.launch.signals import Relay, kill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_OF_SIGNAL = 128  # and its number: the exit code of a shell


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
    try:
        run = load("torch.distributed.run")
        multiprocessing = load("torch.distributed.elastic.multiprocessing")
        signals = load("torch.distributed.elastic.multiprocessing.api")
    except KeyboardInterrupt:  # nothing runs yet
        return _OF_SIGNAL + signal.SIGINT
    relay = Relay(signals.SignalException, quiet=quiet)
    # Torch makes this the handler of signals when it starts the workers; it would give up at a second one.
    signals._terminate_process_handler = relay.end
    with relay.listening(), TemporaryDirectory(prefix="accel-launch-", ignore_cleanup_errors=True) as folder:
        try:
            # A folder that was asked for comes later in the line, and wins.
            run.main([f"--log_dir={folder}", *arguments[quiet:]])
        except multiprocessing.errors.ChildFailedError as error:
            return _failed(error, quiet=quiet)
        except signals.SignalException as error:
            _write("" if quiet else tell_all(words_in(Path(folder))))
            return _OF_SIGNAL + int(error.sigval)
    return 0


def _failed(error: Any, *, quiet: bool) -> int:
    """Tell what has failed, and give the exit code."""
    words = {rank: words_of_failure(failure) for rank, failure in error.failures.items()}
    first, _ = error.get_first_failure()
    if words[first].trace:  # torch knows whole seconds only, in which others may have failed of it
        first = min((rank for rank in words if words[rank].trace), key=lambda rank: words[rank].time)
    kill([failure.pid for failure in error.failures.values()], signal.SIGTERM)  # what they have left behind
    if not quiet:
        _write(tell(words, first))
    return _exit_code(cast("int", error.failures[first].exitcode))


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # the terminal is gone
        pass


def _exit_code(code: int) -> int:
    """As a shell reports it: a process that a signal ended has a negative code in Python."""
    return code if code >= 0 else _OF_SIGNAL - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
