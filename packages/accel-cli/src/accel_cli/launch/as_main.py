"""Run a script as `python script` does, and leave the traceback of an error to who started the workers."""

from __future__ import annotations

import builtins
import json
import sys
import time
import traceback
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path
from runpy import _run_module_as_main  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownVariableType] - `python -m`
from typing import TYPE_CHECKING, Any

from accel_state.environ import read

if TYPE_CHECKING:
    from types import TracebackType

_OURS = (__file__, str(Path(__file__).with_name("worker.py")), "<frozen runpy>")
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable in which torch.distributed.run tells a worker where to write its error."""


def run(arguments: list[str]) -> None:
    """Become the script.

    Args:
        arguments: `--aloud`, with which tracebacks appear where and when they happen, or nothing; `-m` or
            nothing; the script or module, and what it is given.
    """
    rest = list(arguments)
    aloud = rest[:1] == ["--aloud"] and bool(rest.pop(0))
    is_module = rest[:1] == ["-m"] and bool(rest.pop(0))
    error_file = read().get(ERROR_FILE)
    if error_file and not aloud:
        sys.excepthook = partial(_record, error_file)
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


def _record(
    error_file: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Write an error as torch.distributed.run reads it; one of the user's keyboard is shown as ever."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    text = "".join(traceback.format_exception(kind, error, _of_script(trace)))
    told: dict[str, Any] = {
        "message": {
            "message": f"{kind.__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))},
        }
    }
    try:
        Path(error_file).write_text(json.dumps(told), encoding="utf-8")
    except OSError:
        sys.stderr.write(text)


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this module and of runpy, which are there in every one."""
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename in _OURS:
        found = found.tb_next
    return found
