"""Find the ranks that the others wait for, from samples of each rank's activity; torch-free.

The thread of the hang monitor checks about twenty times a second whether the main thread is in a collective.
The training step itself is unchanged. A slow rank spends a smaller fraction of its time in collectives than
the others, which wait for it there.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from types import CodeType
from typing import Any

from accel_state.rank_status import RankStatus, call_site, format_ranks, source_location

SAMPLE_S = 0.05  # seconds between two samples
STEPS = 100  # optimizer steps per log line
SECONDS = 10.0  # the minimum duration of these steps
SHARE = 0.1  # fraction of the time: ranks that are waited for less are not named
LEAST = 100  # samples of a rank, so that chance names nobody
_SITES = 400  # samples outside of collectives that are remembered
_SHOWN = 3  # ranks whose lines are logged


class RankSampler:
    """Samples of the activity of this rank's main thread.

    Args:
        steps: Returns how many optimizer steps this rank has done.
        folder: The folder of torch.distributed: a thread whose innermost frame is there is waiting, too.
    """

    def __init__(self, steps: Callable[[], int], folder: str) -> None:
        self.steps = steps
        self.samples = 0
        self.waits = 0
        self.report: dict[str, float] = {}
        self._folder = folder
        self._main = threading.main_thread().ident or 0
        self._sites: deque[tuple[CodeType, int] | None] = deque(maxlen=_SITES)
        self._before: Mapping[int, RankStatus] = {}
        self._since = 0.0

    def take(self, *, is_inside: bool) -> None:
        """Take a sample; `is_inside` says whether the main thread is in a monitored collective."""
        self.samples += 1
        frame = None if is_inside else sys._current_frames().get(self._main)
        if is_inside or (frame is not None and frame.f_code.co_filename.startswith(self._folder)):
            self.waits += 1
        else:
            self._sites.append(call_site(frame))

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of a `RankStatus` that report the samples to other ranks."""
        counted = Counter(self._sites).most_common(1)
        location, source = source_location(counted[0][0] if counted else None)
        busy = f"{location} `{source}`" if location else ""
        return {"steps": self.steps(), "samples": self.samples, "waits": self.waits, "busy": busy}

    def is_due(self, now: float) -> bool:
        """Whether enough steps were done, and enough time has passed, to look at all ranks."""
        if not self._before:
            return self.steps() > 0
        done = max(status.steps for status in self._before.values())
        return self.steps() >= done + STEPS and now - self._since >= SECONDS

    def compare(self, statuses: Mapping[int, RankStatus | None], now: float) -> str | None:
        """Compare with the statuses of the last call; return a line that names slow ranks, if any."""
        known = {rank: status for rank, status in statuses.items() if status is not None}
        if len(known) < len(statuses):
            return None
        counts = {
            rank: (status.samples - self._before[rank].samples, status.waits - self._before[rank].waits)
            for rank, status in known.items()
            if self._before
        }
        if counts and min(samples for samples, _ in counts.values()) < LEAST:
            return None  # until there are more
        before, self._before = self._before, known
        seconds, self._since = now - self._since, now
        if not counts:
            return None
        slow = find_slow({rank: waits / samples for rank, (samples, waits) in counts.items()})
        slowest = sorted(slow, key=lambda rank: -slow[rank])
        self.report = {
            "system/straggler_share": max(slow.values(), default=0.0),
            "system/straggler_rank": slowest[0] if slow else -1,
        }
        if not slow:
            return None
        steps = max(known[rank].steps - before[rank].steps for rank in known)
        shown = "; ".join(
            f"rank {rank} ({status.host}) is most often at {status.busy or 'no line of the program'}"
            for rank, status in ((rank, known[rank]) for rank in slowest[:_SHOWN])
        )
        more = f"; and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
        return (
            f"In the last {steps} steps ({seconds:.0f} s) the others waited for {format_ranks(sorted(slow))} "
            f"in {slow[slowest[0]]:.0%} of the time: {shown}{more}."
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
    slow: dict[int, float] = {}
    for rank, share in shares.items():
        others = sorted(other for index, other in shares.items() if index != rank)
        if others and others[len(others) // 2] - share >= SHARE:
            slow[rank] = round(others[len(others) // 2] - share, 3)
    return slow
