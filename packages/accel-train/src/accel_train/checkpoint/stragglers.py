"""Find out whether ranks that have not come will ever come, by what they last posted about themselves."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from accel_state.errors import DistributedOperationException, StalledCollectiveError
from accel_state.rank_status import format_ranks, format_statuses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_state.hang_monitor import HangMonitor
    from accel_state.rank_status import RankStatus

logger = logging.getLogger(__name__)

STUCK_S = 3.0  # a rank that has been in another collective for so long will not come
SILENT_S = 60.0  # a rank that has given no sign of life for so long is taken to be dead
WARN_AFTER_S = 30.0  # a wait of so long is worth a warning
POLL_S = 0.5  # between two looks; more where so many ranks share the store that they post less often
RANKS_PER_S = 200  # that may post in a second, as the hang monitor has it


class StragglerMonitor:
    """Judge the ranks for which another one waits.

    Args:
        monitor: What ranks post about themselves; `None` where nothing is monitored.
        rank: Index of this process. Rank 0 looks where all ranks are before it raises; the others, of which
            there may be thousands, look only at rank 0 and themselves.
        compare_locations: Whether a rank that is in another collective, or has ended, cannot come any more.
    """

    def __init__(
        self,
        operation: str,
        monitor: HangMonitor | None,
        *,
        rank: int,
        world_size: int,
        compare_locations: bool,
    ) -> None:
        self._operation = operation
        self._monitor = monitor
        self._rank = rank
        self._shown: Sequence[int] = range(world_size) if rank == 0 else (0, rank)
        self._compare_locations = compare_locations
        self._pause = max(POLL_S, world_size / RANKS_PER_S)
        self._began = self._polled = time.monotonic()
        self._warned = rank > 1  # one of the ranks that wait for rank 0 warns for all
        self._seen: dict[int, tuple[tuple[int, str] | None, float, int, float]] = {}

    def is_due(self) -> bool:
        """Return whether it is time to look again."""
        return self._monitor is not None and time.monotonic() - self._polled >= self._pause

    def poll(self, missing: Sequence[int]) -> None:
        """Judge by what the missing ranks last said about themselves."""
        if self._monitor is None:
            return
        now = self._polled = time.monotonic()
        if self._compare_locations and self._monitor.diagnosis is not None:
            raise StalledCollectiveError(f"{self._operation}: {self._monitor.diagnosis}")
        for rank, status in self._monitor.statuses(missing).items():
            reason = None if status is None else self._judge(status, self._monitor.count, now)
            if reason is not None:
                raise DistributedOperationException(
                    f"{self._operation} must be called on every rank, but rank {rank} {reason}: "
                    f"{format_statuses(self._monitor.statuses(self._shown))}."
                )
        if now - self._began >= WARN_AFTER_S and not self._warned:
            self._warned = True
            statuses = self._monitor.statuses(self._shown)
            logger.warning(
                "%s waits for %s: %s.", self._operation, format_ranks(missing), format_statuses(statuses)
            )

    def _judge(self, status: RankStatus, collective: int, now: float) -> str | None:
        """Return why a rank will not come, if that is certain."""
        # In another collective, which needs this rank; for some time, since statuses may be a second old.
        passed = status.inside and status.collective >= collective
        location = (status.collective, status.location) if passed else None
        old_location, since, heartbeat, heard = self._seen.get(status.rank, (None, now, -1, now))
        since = since if location is not None and location == old_location else now
        heard = heard if status.heartbeat == heartbeat else now
        self._seen[status.rank] = (location, since, status.heartbeat, heard)
        if self._compare_locations and status.exited:
            return "has ended"
        if self._compare_locations and now - since >= STUCK_S:
            return "waits elsewhere"
        return "gives no sign of life" if now - heard >= SILENT_S else None
