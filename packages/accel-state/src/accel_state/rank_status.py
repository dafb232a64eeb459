"""Report the status of each rank, and compare the collective calls of ranks; torch-free."""

from __future__ import annotations

import inspect
import json
import linecache
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from accel_state.errors import DistributedOperationException
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from accel_state.collectives import Collectives


_SOURCE_WIDTH = 80  # characters of a source line that are shown
_INTERNAL = frozenset(
    {"accel", "accel_cli", "accel_train", "accel_plugins", "accel_ops", "accel_state", "torch"}
    | sys.stdlib_module_names
)
_internal_files: dict[str, bool] = {}


@frozen
class RankStatus:
    """The last status that one rank posted.

    Args:
        heartbeat: Number of posts; it stops when the process is gone.
        location: File and line of the user's program, such as `train.py:88`.
        source: The source line there, or the name of the operation.
        collective: Number of collectives that it has begun.
        inside: Whether it is inside the last one.
        exited: Whether it has destroyed its process group or ended.
        host: The name of its node.
        steps: Optimizer steps that it has done.
        samples: Number of samples of the rank; see `accel_state.stragglers`.
        waits: How many of the samples were in a collective.
        busy: File, line and source most frequent in the other samples.
    """

    rank: int
    heartbeat: int = 0
    location: str = ""
    source: str = ""
    collective: int = 0
    inside: bool = False
    exited: bool = False
    host: str = ""
    steps: int = 0
    samples: int = 0
    waits: int = 0
    busy: str = ""

    def to_text(self) -> str:
        """Serialise for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, data: bytes | str) -> RankStatus:
        """Parse the result of `to_text`."""
        return cls(**json.loads(data))


def call_site(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """Return the innermost call site in the user's program among the callers of a frame.

    Frames of accel, torch and the standard library are skipped. Costs about a tenth of a microsecond per
    frame; `source_location` formats the result when it is needed.

    Returns:
        The code and the offset of the instruction in it, or `None` without a frame.
    """
    known = _internal_files
    innermost = frame
    while frame is not None:
        code = frame.f_code
        internal = known.get(code.co_filename)
        if internal is None:
            name = str(frame.f_globals.get("__name__", ""))
            internal = known[code.co_filename] = name.partition(".")[0] in _INTERNAL
        if not internal:
            return code, frame.f_lasti
        frame = frame.f_back
    return (innermost.f_code, innermost.f_lasti) if innermost is not None else None


def main_thread_site() -> tuple[CodeType, int] | None:
    """Return the current `call_site` of the main thread."""
    return call_site(sys._current_frames().get(threading.main_thread().ident or 0))


def source_location(site: tuple[CodeType, int] | None) -> tuple[str, str]:
    """Return file with line, and the source line, of a `call_site`.

    Returns:
        Such as `("eval.py:41", "preds = gather(preds)")`. The path is relative to the current directory
        where it lies below it.
    """
    if site is None:
        return "", ""
    code, offset = site
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    line = line or code.co_firstlineno
    path = Path(code.co_filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    source = linecache.getline(code.co_filename, line).strip() or f"{code.co_name}()"
    return f"{path}:{line}", source[:_SOURCE_WIDTH]


def format_statuses(statuses: Mapping[int, RankStatus | None], *, silent: Iterable[int] = ()) -> str:
    """Format the statuses of ranks in one line, the minority first.

    Args:
        statuses: The last status of ranks, in rank order; `None` for a rank without one.
        silent: Ranks whose heartbeat has stopped.

    Example:
        >>> waiting = RankStatus(rank=0, location="a.py:8", source="f()", inside=True, collective=4)
        >>> late = RankStatus(rank=3, location="b.py:4", source="g()", collective=3)
        >>> format_statuses({0: waiting, 1: waiting, 2: waiting, 3: late})
        'rank 3 is at b.py:4 `g()` (in no collective, after 3); ranks 0-2 are at a.py:8 `f()` (collective 4)'
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    gone = frozenset(silent)
    for rank, status in statuses.items():
        groups[_describe(status, is_silent=rank in gone)].append(rank)
    return "; ".join(
        f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}"
        for text, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    )


def _describe(status: RankStatus | None, *, is_silent: bool) -> str:
    if status is None:
        return "without a status in the store"
    if status.exited:
        return f"gone after {status.collective} collectives"
    done = (
        f"collective {status.collective}" if status.inside else f"in no collective, after {status.collective}"
    )
    silence = ", no longer answers" if is_silent else ""
    return f"at {status.location} `{status.source}` ({done}{silence})"


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks in ascending order.

    Example:
        >>> format_ranks([3]), format_ranks([0, 1, 2, 5])
        ('rank 3', 'ranks 0-2, 5')
    """
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    text = ", ".join("-".join(map(str, span)) for span in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


SHOWN = 6  # leaves per rank in the table

Description = tuple[str, str, "tuple[int, ...] | None"]  # path, type, shape


@frozen
class Call:
    """The collective that one rank is about to call.

    Attributes:
        where: File and line of the user's program.
        operation: The name of the collective.
        detail: Its other arguments, as text.
        leaves: Path, type and shape of every leaf; no shape for a leaf that is not a tensor.
    """

    where: str
    operation: str
    detail: str = ""
    leaves: tuple[Description, ...] = ()


def compare_calls(
    collectives: Collectives,
    operation: str,
    leaves: Iterable[Description] = (),
    *,
    detail: str = "",
    rows_differ: bool = False,
) -> None:
    """Check that all ranks are about to call the same collective; called by every rank before each.

    Args:
        collectives: The collectives of the run.
        operation: The name of the collective.
        leaves: Path, type and shape of every leaf of its data.
        detail: Its other arguments, as text; they must agree.
        rows_differ: Sizes of dimension 0 need not agree.

    Raises:
        DistributedOperationException: Calls differ. Every rank raises it, with a table of each rank's
            call site, collective and data.
    """
    where, _ = source_location(call_site(inspect.currentframe()))
    own = Call(where=where, operation=operation, detail=detail, leaves=tuple(leaves))
    calls: list[Call] = collectives.all_gather_object(own)
    facts = [frozenset(_facts(call, rows_differ=rows_differ)) for call in calls]
    if len({(call.operation, call.detail, fact) for call, fact in zip(calls, facts, strict=True)}) > 1:
        raise DistributedOperationException(explain(calls, rows_differ=rows_differ))


def explain(calls: Sequence[Call], *, rows_differ: bool = False) -> str:
    """Format a table of the ranks' calls: rank, call site, operation, and the leaves in which they differ."""
    same_operation = len({(call.operation, call.detail) for call in calls}) == 1
    common = set.intersection(*(_facts(call, rows_differ=rows_differ) for call in calls))
    rows = [("rank", "call site", "operation", "shapes and dtypes")]
    for rank, call in enumerate(calls):
        odd = [leaf for leaf in call.leaves if not same_operation or _fact(leaf, rows_differ) not in common]
        shown = "; ".join(map(_text, odd[:SHOWN])) or ("-" if call.leaves else "no tensors")
        more = f"; and {len(odd) - SHOWN} more" if len(odd) > SHOWN else ""
        name = f"{call.operation} ({call.detail})" if call.detail else call.operation
        rows.append((str(rank), call.where or "?", name, shown + more))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )
    problem = "on data that does not fit together" if same_operation else "different operations"
    return f"The processes call {problem}. All stop here, since their collectives cannot complete.\n{table}"


def _text(leaf: Description) -> str:
    path, kind, shape = leaf
    return f"data{path}: {kind}{'' if shape is None else list(shape)}"


def _fact(leaf: Description, rows_differ: bool) -> Any:
    path, kind, shape = leaf
    if shape is None or not rows_differ:
        return leaf
    return path, kind, len(shape), shape[1:]


def _facts(call: Call, *, rows_differ: bool) -> set[Any]:
    return {_fact(leaf, rows_differ) for leaf in call.leaves}
