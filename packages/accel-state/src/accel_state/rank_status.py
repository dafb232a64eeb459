"""The status of each rank, and its text; torch-free."""

from __future__ import annotations

import json
import linecache
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from accel_state.frozen import frozen

_SOURCE_WIDTH = 80  # characters of a source line that are shown
_INTERNAL = frozenset(
    {"accel", "accel_cli", "accel_convert", "accel_inspect", "accel_train", "accel_plugins"}
    | {"accel_ops", "accel_state", "torch"}
    | sys.stdlib_module_names
)


@frozen
class RankStatus:
    """The last status that one rank posted.

    Args:
        heartbeat: Number of posts; it stops when the process is gone.
        location: File and line of the user's program, such as `train.py:88`.
        source: The source line there, or the name of the function.
        collective: Number of collectives that it has begun.
        inside: Whether it is inside the last one.
        exited: Whether it has destroyed its process group or ended.
        host: The name of its node.
        steps: Optimizer steps that it has done.
        samples: Number of samples of the rank; see `accel_state.stragglers`.
        waits: How many of the samples were in a collective.
        busy: File, line and source most frequent in the other samples.
        run: Number of samplers that this process has had before; samples of an earlier one do not count.
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
    run: int = 0

    def to_text(self) -> str:
        """Serialise for the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, data: bytes | str) -> RankStatus:
        """Parse the result of `to_text`."""
        return cls(**json.loads(data))


def call_site(frame: FrameType | None) -> tuple[str, str]:
    """Return file with line, and the source line, of the innermost call in the user's program.

    Callers of the frame in accel, torch and the standard library are skipped.

    Returns:
        Such as `("eval.py:41", "preds = gather(preds)")`; two empty texts without a frame. The path is
        relative to the current directory where it lies below it.
    """
    user = frame
    while user is not None and str(user.f_globals.get("__name__")).partition(".")[0] in _INTERNAL:
        user = user.f_back
    if (user := user or frame) is None:
        return "", ""
    line = user.f_lineno or user.f_code.co_firstlineno  # some instructions belong to no line
    path = Path(user.f_code.co_filename)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    source = linecache.getline(user.f_code.co_filename, line).strip() or f"{user.f_code.co_name}()"
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
    for rank, status in statuses.items():
        if status is None:
            text = "without a status in the store"
        elif status.exited:
            text = f"gone after {status.collective} collectives"
        else:
            done = "collective" if status.inside else "in no collective, after"
            silence = ", no longer answers" if rank in silent else ""
            text = f"at {status.location} `{status.source}` ({done} {status.collective}{silence})"
        groups[text].append(rank)
    return "; ".join(
        f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} {text}"
        for text, ranks in sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    )


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
