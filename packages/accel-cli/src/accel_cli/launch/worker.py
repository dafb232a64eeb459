"""Run the user's script in a rank: as `__main__`, with an error file, ending with the launcher.

torch.distributed.run starts this module in every rank. It runs as the module `__main__`, whose names the
script replaces.
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
from pkgutil import read_code
from runpy import _run_module_as_main  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType] - `python -m`
from types import TracebackType
from typing import Any
from zipfile import is_zipfile

from accel_state.environ import read
from accel_state.errors import SettingsError
from accel_state.libraries import hide_import_notices
from accel_state.platforms import die_with_parent, is_windows
from accel_state.topology import detect
from accel_train.worker_errors import (
    ERROR_FILE,
    format_all_errors,
    parse_worker_errors,
    stack_file,
    worker_error,
)


def run(arguments: list[str]) -> None:
    """Run the script in this process.

    Args:
        arguments: Optionally `--launcher=<pid>`, the parent with which this process ends. Then either
            `--program`, a program and its arguments; or optionally `--aloud`, which prints tracebacks
            at once, optionally `-m`, the script or module, and its arguments.
    """
    words = list(arguments)
    if words[0].startswith("--launcher="):
        die_with_parent(int(words.pop(0).partition("=")[2]))
    if words[0] == "--program":
        os.execv(words[1], words[1:])  # noqa: S606 - without a shell
    aloud = words[:1] == ["--aloud"] and bool(words.pop(0))
    is_module = words[:1] == ["-m"] and bool(words.pop(0))
    error_file = None if aloud else read().get(ERROR_FILE)
    sys.excepthook = partial(_write_error_file, error_file or None)
    if error_file:
        _write_stack_file(stack_file(error_file, _rank()))
    sys.argv[:] = words
    hide_import_notices()
    names = sys.modules["__main__"].__dict__
    names.clear()
    names.update(__name__="__main__", __builtins__=builtins)
    try:
        if is_module:
            _run_module_as_main(words[0])
        else:
            _run_file(words[0], names)
    except SystemExit as request:
        _write_exit_code(error_file, request.code)
        raise
    _write_exit_code(error_file, 0)


EXIT_CODE_FILE = "exit_code"
"""The file beside the error file with the exit code of a script that ended by itself.

After a signal torch.distributed.run does not say how the workers ended, and the script may have handled it.
"""


def _write_exit_code(error_file: str | None, code: object) -> None:
    if error_file:
        number = code & 0xFF if isinstance(code, int) else int(code is not None)
        with contextlib.suppress(OSError):
            Path(error_file).with_name(EXIT_CODE_FILE).write_text(str(number), encoding="ascii")


def _run_file(script: str, names: dict[str, Any]) -> None:
    """Execute a file, also a compiled one, in the module `__main__`; pickle finds its definitions there.

    Of a folder or a zip file this is its `__main__.py`, as with `python`.
    """
    path = Path(script).absolute()
    if path.is_dir() or is_zipfile(path):
        sys.path[0] = str(path)
        _run_module_as_main("__main__", alter_argv=False)
        return
    with path.open("rb") as file:
        code = read_code(file)
    code = code or compile(path.read_bytes(), path, "exec", dont_inherit=True)
    if not sys.flags.safe_path:
        sys.path[0] = str(path.resolve().parent)
    names.update(
        __file__=str(path),
        __doc__=None,
        __spec__=None,
        __package__=None,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", str(path)),
    )
    exec(code, names)  # noqa: S102 - the script is what the user asked to run


def _rank() -> int:
    try:
        return detect(read()).rank
    except SettingsError:  # The script will raise this error.
        return 0


def _write_error_file(
    error_file: str | None,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Write the error file that torch.distributed.run reads, or print the traceback at once."""
    # 1. Skip the first frames, which are of this module and of runpy.
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    # 2. Format it. The context of an interrupt is usually the error of a collective with an interrupted rank.
    chain = not issubclass(kind, KeyboardInterrupt)
    text = "".join(traceback.format_exception(kind, error, trace, chain=chain))
    record = worker_error(kind.__name__, str(error), text, _rank(), time.time())
    if error_file:
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps(record), encoding="utf-8")
            return
    sys.stderr.write(format_all_errors({_rank(): parse_worker_errors(record)}))


def _write_stack_file(file: Path) -> None:
    """Make Ctrl-C write the current stack to a file, which is deleted at a normal exit.

    A process that waits for other ranks in C++ never raises `KeyboardInterrupt`, so that it has no traceback.
    """
    if is_windows() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    try:
        stream = file.open("w", encoding="utf-8")
    except OSError:
        return
    atexit.register(file.unlink, missing_ok=True)
    faulthandler.register(signal.SIGINT, stream, all_threads=False, chain=True)
    os.register_at_fork(after_in_child=_unregister_stack_file)


def _unregister_stack_file() -> None:
    """Stop writing the file in a forked process: it belongs to the parent."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        faulthandler.unregister(signal.SIGINT)


if __name__ == "__main__":
    # The script takes over the names of `__main__`, which this copy of the module loses.
    import_module("accel_cli.launch.worker").run(sys.argv[1:])
