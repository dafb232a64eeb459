"""Report the status of each rank; torch-free."""

from __future__ import annotations

import json
import linecache
import sys
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import CodeType, FrameType

from accel_state.frozen import frozen

_SOURCE_WIDTH = 80  # characters of a source line that are shown
_INTERNAL = frozenset(
    {"accel", "accel_cli", "accel_convert", "accel_inspect", "accel_train", "accel_plugins"}
    | {"accel_ops", "accel_state", "torch"}
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
