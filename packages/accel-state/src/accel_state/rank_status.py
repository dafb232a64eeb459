"""The status of each rank, its text, and the ranks that the others wait for; torch-free.

The thread of the hang monitor checks about twenty times a second whether the main thread is in a collective.
The training step itself is unchanged. A slow rank spends a smaller fraction of its time in collectives than
the others, which wait for it there.
"""

from __future__ import annotations

import json
import linecache
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from accel_state.frozen import frozen

SAMPLE_S = 0.05  # seconds between two samples
STEPS = 100  # optimizer steps per log line
SHARE = 0.1  # fraction of the time: ranks that are waited for less are not named
LEAST = 200  # samples of a rank, so that chance names nobody: ten seconds
_SITES = 400  # samples outside of collectives that are remembered
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
        samples: Number of samples of the rank; see `RankSampler`.
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


class RankSampler:
    """Samples of the activity of this rank's main thread.

    Args:
        steps: Returns how many optimizer steps this rank has done.
        folder: The folder of torch.distributed: a thread whose innermost frame is there is waiting, too.
        run: Number of samplers that this process has had before, as of an earlier `Accelerator`.
    """

    def __init__(self, steps: Callable[[], int], folder: str, run: int = 0) -> None:
        self.steps = steps
        self.run = run
        self.samples = 0
        self.waits = 0
        self.report: dict[str, float] = {}
        self._folder = folder
        self._sites: deque[tuple[str, str]] = deque(maxlen=_SITES)
        self._before: Mapping[int, RankStatus] = {}

    def take(self, *, is_inside: bool) -> None:
        """Take a sample; `is_inside` says whether the main thread is in a monitored collective."""
        self.samples += 1
        frame = None if is_inside else sys._current_frames().get(threading.main_thread().ident or 0)
        if is_inside or (frame is not None and frame.f_code.co_filename.startswith(self._folder)):
            self.waits += 1
        elif frame is not None:
            self._sites.append(call_site(frame))

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of a `RankStatus` that report the samples to other ranks."""
        counted = Counter(self._sites).most_common(1)
        busy = "{} `{}`".format(*counted[0][0]) if counted else ""
        counts = {"steps": self.steps(), "samples": self.samples, "waits": self.waits}
        return {**counts, "busy": busy, "run": self.run}

    def is_due(self) -> bool:
        """Whether this rank has done enough steps to compare the ranks."""
        before = max((status.steps for status in self._before.values()), default=1 - STEPS)
        return self.steps() >= before + STEPS

    def compare(self, statuses: Mapping[int, RankStatus | None]) -> str | None:
        """Compare with the statuses of the last call; return a line that names slow ranks, if any."""
        known = {
            rank: status for rank, status in statuses.items() if status is not None and status.run == self.run
        }
        if len(known) < len(statuses):
            return None
        before = self._before
        counts = {rank: known[rank].samples - before[rank].samples for rank in known if before}
        if counts and min(counts.values()) < LEAST:
            return None  # until there are more
        self._before = known
        if not counts:
            return None
        shares = {rank: (known[rank].waits - before[rank].waits) / counts[rank] for rank in known}
        slow = find_slow(shares)
        slowest = max(slow, key=slow.__getitem__, default=-1)
        self.report = {
            "system/straggler_share": slow.get(slowest, 0.0),
            "system/straggler_rank": slowest,
        }
        if not slow:
            return None
        steps = max(known[rank].steps - before[rank].steps for rank in known)
        return (
            f"In the last {steps} steps the others waited for {format_ranks(sorted(slow))} in "
            f"{slow[slowest]:.0%} of the time: rank {slowest} ({known[slowest].host}) is most often at "
            f"{known[slowest].busy or 'no line of the program'}."
        )


def find_slow(shares: Mapping[int, float]) -> dict[int, float]:
    """Return the ranks that others wait for, each with the minimum fraction of the time that they wait.

    A rank is slow if at least half of the others are in collectives for clearly longer than it is.

    Args:
        shares: The fraction of its time that each rank was in collectives.

    Example:
        >>> find_slow({0: 0.7, 1: 0.3, 2: 0.7})
        {1: 0.4}
    """
    ordered = sorted(shares.values()) or [0.0]
    # A slow rank is in the lower half: without it, the one above the middle is the median of the others.
    usual = ordered[min((len(ordered) + 1) // 2, len(ordered) - 1)]
    return {rank: round(usual - share, 3) for rank, share in shares.items() if usual - share >= SHARE}
