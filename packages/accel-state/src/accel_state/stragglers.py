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
from typing import Any

from accel_state.rank_status import RankStatus, call_site, format_ranks

SAMPLE_S = 0.05  # seconds between two samples
STEPS = 100  # optimizer steps per log line
SHARE = 0.1  # fraction of the time: ranks that are waited for less are not named
LEAST = 200  # samples of a rank, so that chance names nobody: ten seconds
_SITES = 400  # samples outside of collectives that are remembered


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
