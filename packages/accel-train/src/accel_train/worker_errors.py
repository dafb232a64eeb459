"""Error files of workers: write, read and format them; die with the launcher. It imports no torch."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

from accel_state.files import read_json
from accel_state.frozen import frozen
from accel_state.rank_status import format_ranks

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable in which torch.distributed.run tells a worker where to write its error."""


@frozen
class WorkerErrors:
    """The failure of a worker.

    Args:
        how: How it failed: a phrase that follows "rank N" in messages.
        trace: Its traceback, empty if there is none.
        time: Seconds since the epoch, 0 if unknown.
        interrupted: Whether a `KeyboardInterrupt` ended it.
    """

    how: str
    trace: str = ""
    time: float = 0.0
    interrupted: bool = False


def worker_error(kind: str, message: str, trace: str, rank: int, time: float) -> dict[str, Any]:
    """Return the content of an error file in the format of torch.distributed.run, with extra fields."""
    details = {"py_callstack": trace, "timestamp": str(int(time)), "time": time, "rank": rank, "kind": kind}
    return {"message": {"message": f"{kind}: {message}", "extraInfo": details}}


_STACK_FILE = "stack-{}.txt"


def stack_file(error_file: str, rank: int) -> Path:
    """Return the path of the file to which a worker writes its stack on a signal."""
    return Path(error_file).with_name(_STACK_FILE.format(rank))


def parse_worker_errors(content: Any) -> WorkerErrors:
    """Parse the content of an error file."""
    details = _details(content)
    if not details.get("py_callstack"):
        return WorkerErrors(how="failed")
    summary = str(content["message"].get("message", "an error")).partition("\n")[0]
    interrupted = details.get("kind") == KeyboardInterrupt.__name__
    return WorkerErrors(
        how="was interrupted" if interrupted else f"failed with {summary}",
        trace=str(details["py_callstack"]),
        time=float(details.get("time", details.get("timestamp", 0))),
        interrupted=interrupted,
    )


def error_of_failure(failure: Any) -> WorkerErrors:
    """Convert a process failure reported by torch to the error of a worker."""
    error = parse_worker_errors(failure.error_file_data)
    if error.trace:  # a later signal is not the cause
        return error
    if failure.exitcode < 0:  # most real-time signals have no name
        number = -failure.exitcode
        name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
        how = f"was ended by {name}"
    else:
        how = f"ended with exit code {failure.exitcode}"
    return WorkerErrors(how=how, time=float(failure.timestamp))


def read_worker_errors(folder: Path) -> dict[int, WorkerErrors]:
    """Read the error files of the last attempt's workers, by rank."""
    errors: dict[int, WorkerErrors] = {}
    for file in find_error_files(folder, _STACK_FILE.format("*")):
        # The first stack of a dump of `faulthandler`, in the order of a traceback, without our frames.
        dump = file.read_text(encoding="utf-8").splitlines()[1:]
        stack = takewhile(lambda line: line.startswith("  File "), dump)
        if lines := [line for line in stack if not _WORKER_FRAME.match(line)]:
            trace = "\n".join(["Stack (most recent call last):", *reversed(lines)])
            rank = int(file.stem.rpartition("-")[2])
            errors[rank] = WorkerErrors(how="was interrupted, and did not end", trace=trace)
    for file in find_error_files(folder):
        with contextlib.suppress(ValueError):  # its worker was killed as it wrote the file
            content = read_json(file)
            errors[int(_details(content).get("rank", file.parent.name))] = parse_worker_errors(content)
    return errors


def find_error_files(folder: Path, pattern: str = "error.json") -> list[Path]:
    """Find the error files of the last attempt in the log folder of torch's elastic launcher.

    Their folders are named after the local ranks: `<folder>/<run>/attempt_<number>/<local rank>/error.json`.
    """
    attempts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    return sorted(attempts[-1].glob(f"*/{pattern}")) if attempts else []


def _details(content: Any) -> dict[str, Any]:
    message = content.get("message") if isinstance(content, dict) else None
    details = message.get("extraInfo") if isinstance(message, dict) else None
    return cast("dict[str, Any]", details) if isinstance(details, dict) else {}


# The outermost frames of every worker.
_WORKER_FRAME = re.compile(r'  File "(?:[^"]*[/\\]accel_cli[/\\]launch[/\\]worker\.py|<frozen runpy>)"')


def format_errors(errors: Mapping[int, WorkerErrors], first: int) -> str:
    """Return one line per failed rank, then the traceback of rank `first`."""
    later = [_format_line([rank], errors[rank]) for rank in sorted(errors) if rank != first]
    return "\n".join([*later, _format_same([first], errors[first])])


def format_all_errors(errors: Mapping[int, WorkerErrors]) -> str:
    """Return the distinct tracebacks, each with the ranks that raised it."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank in sorted(errors):
        alike.setdefault((errors[rank].how, errors[rank].trace), []).append(rank)
    return "".join(_format_same(ranks, errors[ranks[0]]) for ranks in alike.values())


def _format_same(ranks: list[int], errors: WorkerErrors) -> str:
    return "\n".join([_format_line(ranks, errors), *([errors.trace.rstrip()] if errors.trace else []), ""])


def _format_line(ranks: list[int], errors: WorkerErrors) -> str:
    how = errors.how.replace("was ", "were ", 1) if len(ranks) > 1 else errors.how
    return f"accel launch: {format_ranks(ranks)} {how}"
