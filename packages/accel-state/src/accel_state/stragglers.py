"""Find the ranks that the others wait for, from samples of each rank's activity; torch-free.

The thread of the hang monitor checks about twenty times a second whether the main thread is in a collective.
The training step itself is unchanged. A slow rank spends a smaller fraction of its time in collectives than
the others, which wait for it there.
"""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from math import sqrt
from types import CodeType
from typing import Any

from accel_state.frozen import frozen
from accel_state.rank_status import RankStatus, call_site, format_ranks, source_location

SAMPLE_S = 0.05  # seconds between two samples, on average
STEPS = 100  # optimizer steps per log line
SECONDS = 10.0  # the minimum duration of these steps
SHARE = 0.1  # fraction of the time: ranks that are waited for less are not named
_SIGMAS = 4  # by which a fraction must exceed the noise of sampling
_SITES = 400  # samples outside of collectives that are remembered


class RankSampler:
    """Samples of the activity of this rank's main thread.

    Args:
        steps: Returns how many optimizer steps this rank has done.
        folder: The folder of torch.distributed: a thread whose innermost frame is there is waiting, too.
        run: The number of this sampler in the process; statuses of earlier samplers are not compared.
    """

    def __init__(self, steps: Callable[[], int], folder: str, run: int = 0) -> None:
        self.steps = steps
        self.run = run
        self.samples = 0
        self.waits = 0
        self.report: dict[str, float] = {}
        self._folder = folder
        self._main = threading.main_thread().ident or 0
        self._sites: deque[tuple[CodeType, int] | None] = deque(maxlen=_SITES)
        self._before: Mapping[int, RankStatus] = {}
        self._now: float = 0.0
        self._random = random.Random()  # noqa: S311 - no secret; leaves the script's generator unchanged

    def pause(self) -> float:
        """Return a random delay in seconds until the next sample, so that samples do not align with steps."""
        return SAMPLE_S * self._random.uniform(0.5, 1.5)

    def take(self, *, is_inside: bool) -> None:
        """Take a sample; `is_inside` says whether the main thread is in a monitored collective."""
        self.samples += 1
        frame = None if is_inside else sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage] - public in all but name
        if is_inside or (frame is not None and frame.f_code.co_filename.startswith(self._folder)):
            self.waits += 1
        else:
            self._sites.append(call_site(frame))

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of a `RankStatus` that report the samples to other ranks."""
        counted = Counter(self._sites).most_common(1)
        location, source = source_location(counted[0][0] if counted else None)
        busy = f"{location} `{source}`" if location else ""
        counts = {"steps": self.steps(), "samples": self.samples, "waits": self.waits}
        return {**counts, "busy": busy, "run": self.run}

    def is_due(self, now: float) -> bool:
        """Whether enough steps were done, and enough time has passed, to look at all ranks."""
        if not self._before:
            return self.steps() > 0
        done = max(status.steps for status in self._before.values())
        return self.steps() >= done + STEPS and now - self._now >= SECONDS

    def compare(self, statuses: Mapping[int, RankStatus | None], now: float) -> str | None:
        """Compare with the statuses of the last call; return a line that names slow ranks, if any."""
        known = {
            rank: status for rank, status in statuses.items() if status is not None and status.run == self.run
        }
        if len(known) < len(statuses):
            return None
        before, self._before = self._before, known
        seconds, self._now = now - self._now, now
        self.report = {}
        if not before:
            return None
        windows = {
            rank: Window(
                samples=status.samples - before[rank].samples,
                waits=status.waits - before[rank].waits,
                host=status.host,
                busy=status.busy,
            )
            for rank, status in known.items()
        }
        slow = find_slow(windows)
        steps = max(known[rank].steps - before[rank].steps for rank in known)
        self.report = {
            "system/straggler_share": max(slow.values(), default=0.0),
            "system/straggler_rank": max(slow, key=slow.__getitem__, default=-1),
        }
        return format_slow(windows, slow, steps=steps, seconds=seconds) if slow else None


@frozen
class Window:
    """The samples of one rank during some steps.

    Args:
        samples: Number of samples.
        waits: Number of samples in a collective.
        host: The name of its node.
        busy: Where it was most often outside of collectives.
    """

    samples: int
    waits: int
    host: str = ""
    busy: str = ""

    @property
    def share(self) -> float:
        """The fraction of its time that the rank was in collectives."""
        return self.waits / max(self.samples, 1)


def find_slow(windows: Mapping[int, Window]) -> dict[int, float]:
    """Return the ranks that others wait for, each with the minimum fraction of the time that they wait.

    A rank is slow if at least half of the others are in collectives for clearly longer than it is.

    Example:
        >>> waiting, busy = Window(samples=1000, waits=700), Window(samples=1000, waits=300)
        >>> find_slow({0: waiting, 1: busy, 2: waiting})
        {1: 0.4}
    """
    slow: dict[int, float] = {}
    for rank, window in windows.items():
        others = [other for index, other in windows.items() if index != rank]
        least = min((other.samples for other in (*others, window)), default=0)
        if not others or least < 1:
            continue
        usual = sorted(other.share for other in others)[len(others) // 2]
        chance = _SIGMAS * sqrt((usual * (1 - usual) + window.share * (1 - window.share)) / least)
        if usual - window.share >= max(SHARE, chance):
            slow[rank] = round(usual - window.share, 3)
    return slow


def format_slow(
    windows: Mapping[int, Window], slow: Mapping[int, float], *, steps: int, seconds: float
) -> str:
    """Format the line about slow ranks, the slowest first.

    Example:
        >>> slow = Window(samples=10, waits=3, host="b", busy="a.py:3 `f()`")
        >>> print(format_slow({1: slow}, {1: 0.4}, steps=100, seconds=20).partition(": ")[0])
        In the last 100 steps (20 s) the others waited for rank 1 in 40% of the time
    """
    worst = sorted(slow, key=lambda rank: -slow[rank])
    shown = "; ".join(
        f"rank {rank} ({window.host}) is most often at {window.busy or 'no line of the program'}"
        for rank, window in ((rank, windows[rank]) for rank in worst[:_SHOWN])
    )
    more = f"; and {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
    ranks, share = format_ranks(sorted(slow)), max(slow.values())
    return (
        f"In the last {steps} steps ({seconds:.0f} s) the others waited for {ranks} in {share:.0%} of the "
        f"time: {shown}{more}."
    )


_SHOWN = 3
