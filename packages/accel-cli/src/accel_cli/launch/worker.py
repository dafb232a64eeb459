"""Become the user's script.

torch.distributed.run starts this module once for every rank. It is the module `__main__`, and its names give
way to those of the script.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from functools import partial
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from runpy import _run_module_as_main  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType] - `python -m`
from types import TracebackType
from typing import Any

from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.topology import detect
from accel_train.worker_errors import (
    ERROR_FILE,
    die_with_parent,
    format_all_errors,
    parse_worker_errors,
    stack_file,
    worker_error,
)


def run(arguments: list[str]) -> None:
    """Become the script.

    Args:
        arguments: `--launcher=<pid>`, the parent, with which this process ends, or nothing; `--program`, and
            then a program and what it is given. Or `--aloud`, with which tracebacks appear where and when
            they happen, or nothing; `-m` or nothing; the script or module, and what it is given.
    """
    rest = list(arguments)
    if rest[0].startswith("--launcher="):
        die_with_parent(int(rest.pop(0).partition("=")[2]))
    if rest[0] == "--program":
        os.execv(rest[1], rest[1:])  # noqa: S606 - no shell is wanted
    aloud = rest[:1] == ["--aloud"] and bool(rest.pop(0))
    is_module = rest[:1] == ["-m"] and bool(rest.pop(0))
    error_file = None if aloud else read().get(ERROR_FILE)
    sys.excepthook = partial(_write_error_file, error_file or None)
    if error_file:
        _write_stack_file(stack_file(error_file, _rank()))
    sys.argv[:] = rest
    names = sys.modules["__main__"].__dict__
    names.clear()
    names.update(__name__="__main__", __builtins__=builtins)
    if is_module:
        _run_module_as_main(rest[0])
    else:
        _run_file(rest[0], names)


def _run_file(script: str, names: dict[str, Any]) -> None:
    """Execute a file in the module `__main__`, so that what it defines can be pickled."""
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    names.update(
        __file__=script,
        __doc__=None,
        __spec__=None,
        __package__=None,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", script),
    )
    exec(code, names)  # noqa: S102 - the script is what the user asked to run


def _rank() -> int:
    try:
        return detect(read()).rank
    except SettingsError:  # the script will raise it
        return 0


def _write_error_file(
    error_file: str | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Write an error file as torch.distributed.run reads it, or print the traceback at once."""
    # What comes before an interrupt is mostly an error from a rank that was interrupted, too.
    chain = not issubclass(kind, KeyboardInterrupt)
    text = "".join(traceback.format_exception(kind, error, _of_script(trace), chain=chain))
    record = worker_error(kind.__name__, str(error), text, _rank(), time.time())
    if error_file:
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps(record), encoding="utf-8")
            return
    sys.stderr.write(format_all_errors({_rank(): parse_worker_errors(record)}))


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this module and of runpy, which are there in every one."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        found = found.tb_next
    return found


def _write_stack_file(file: Path) -> None:
    """Write down at what line an interrupt from the keyboard comes, as long as it has not ended this process.

    One that waits for other ranks in C++ does not get to its `KeyboardInterrupt`.
    """
    if sys.platform == "win32" or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    try:
        stream = file.open("w", encoding="utf-8")
    except OSError:
        return
    atexit.register(file.unlink, missing_ok=True)
    faulthandler.register(signal.SIGINT, stream, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=_remove_stack_file)


def _remove_stack_file() -> None:
    """Leave the file to the process that has forked this one."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        faulthandler.unregister(signal.SIGINT)


if __name__ == "__main__":
    # The script takes over the names of `__main__`, which this copy of the module loses.
    import_module("accel_cli.launch.worker").run(sys.argv[1:])
