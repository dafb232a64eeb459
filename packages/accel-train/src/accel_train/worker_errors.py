"""Error files; die with the launcher; torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from accel_state.files import read_json
from accel_state.rank_status import format_ranks

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable in which torch.distributed.run tells a worker where to write its error."""

# The frames that are outermost in every worker.
_WORKER_FRAME = re.compile(r'  File "(?:[^"]*[/\\]accel_cli[/\\]launch[/\\]worker\.py|<frozen runpy>)"')

_STACK_FILE = "stood-{}.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerErrors:
    """The error of a worker.

    Args:
        how: What follows its rank in a sentence.
        trace: Its traceback, empty if there is none.
        time: Seconds since the epoch, 0 if unknown.
        interrupted: Whether a `KeyboardInterrupt` ended it.
    """

    how: str
    trace: str = ""
    time: float = 0.0
    interrupted: bool = False


def stack_file(error_file: str, rank: int) -> Path:
    """Return the file to which a worker writes its stack upon a signal."""
    return Path(error_file).with_name(_STACK_FILE.format(rank))


def worker_error(kind: str, message: str, trace: str, rank: int, time: float) -> dict[str, Any]:
    """Return the content of an error file as torch.distributed.run reads it, with fields of ours."""
    details = {"py_callstack": trace, "timestamp": str(int(time)), "time": time, "rank": rank, "kind": kind}
    return {"message": {"message": f"{kind}: {message}", "extraInfo": details}}


def parse_worker_errors(record: Any) -> WorkerErrors:
    """Parse an error file."""
    details = _details(record)
    if not details.get("py_callstack"):
        return WorkerErrors(how="failed")
    summary = str(record["message"].get("message", "an error")).partition("\n")[0]
    interrupted = details.get("kind") == KeyboardInterrupt.__name__
    return WorkerErrors(
        how="was interrupted" if interrupted else f"failed with {summary}",
        trace=str(details["py_callstack"]),
        time=float(details.get("time", details.get("timestamp", 0))),
        interrupted=interrupted,
    )


def error_of_failure(failure: Any) -> WorkerErrors:
    """Return the error of a worker whose failure torch reports."""
    found = parse_worker_errors(failure.error_file_data)
    if found.trace:  # a signal that came afterwards tells nothing about the cause
        return found
    if failure.exitcode < 0:
        how = f"was ended by {signal.Signals(-failure.exitcode).name}"
    else:
        how = f"ended with exit code {failure.exitcode}"
    return WorkerErrors(how=how, time=float(failure.timestamp))


def read_worker_errors(folder: Path) -> dict[int, WorkerErrors]:
    """Read the error files of the workers that were started last, by rank."""
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    found: dict[int, WorkerErrors] = {}
    for file in attempts[-1].glob("*/" + _STACK_FILE.format("*")) if attempts else ():
        if stack := _stack(file.read_text(encoding="utf-8")):
            rank = int(file.stem.rpartition("-")[2])
            found[rank] = WorkerErrors(how="was interrupted, and did not end", trace=stack)
    for file in attempts[-1].glob("*/error.json") if attempts else ():
        with contextlib.suppress(ValueError):  # one that was ended as it wrote
            record = read_json(file, error=ValueError)
            found[int(_details(record).get("rank", file.parent.name))] = parse_worker_errors(record)
    return found


def format_errors(errors: Mapping[int, WorkerErrors], first: int) -> str:
    """Return a line for each rank that failed, and last the traceback of the one that failed first."""
    others = [_line([rank], errors[rank]) for rank in sorted(errors) if rank != first]
    return "\n".join([*others, _format_same([first], errors[first])])


def format_all_errors(errors: Mapping[int, WorkerErrors]) -> str:
    """Return all tracebacks, each with the ranks that have it."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(errors):
        alike.setdefault((errors[rank].how, errors[rank].trace), []).append(rank)
    return "".join(_format_same(ranks, errors[ranks[0]]) for ranks in alike.values())


def _format_same(ranks: list[int], errors: WorkerErrors) -> str:
    return "\n".join([_line(ranks, errors), *([errors.trace.rstrip()] if errors.trace else []), ""])


def _line(ranks: list[int], errors: WorkerErrors) -> str:
    how = errors.how.replace("was ", "were ", 1) if len(ranks) > 1 else errors.how
    return f"accel launch: {format_ranks(ranks)} {how}"


def _details(record: Any) -> dict[str, Any]:
    message = record.get("message") if isinstance(record, dict) else None
    details = message.get("extraInfo") if isinstance(message, dict) else None
    return cast("dict[str, Any]", details) if isinstance(details, dict) else {}


def _stack(text: str) -> str:
    """Return what `faulthandler` wrote first, in the order of a traceback and without our own frames."""
    lines: list[str] = []
    for line in text.splitlines()[1:]:
        if not line.startswith("  File "):
            break
        if not _WORKER_FRAME.match(line):
            lines.append(line)
    return "\n".join(["Stack (most recent call last):", *reversed(lines)]) if lines else ""


_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
_PAUSE = 1.0  # seconds between two looks at the parent


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, for whatever reason.

    It is SIGKILL: the parent keeps the store of the job, without which nothing can be finished together, and
    a process that waits for other ranks in C++ would not get to the handler of another signal. On Linux the
    kernel sends it, also after this process has become another program; elsewhere a thread looks at the
    parent once a second. Windows is left out.

    Args:
        parent: Who has started this process; if that has ended already, this one ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    elif sys.platform != "win32":
        threading.Thread(target=_watch, args=(os.getppid(),), name="accel-parent", daemon=True).start()
    if sys.platform != "win32" and not _is_alive(parent):  # it died before anybody could notice
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PAUSE)
    os.kill(os.getpid(), signal.SIGKILL)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, and alive
        pass
    return True
