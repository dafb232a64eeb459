"""Hang diagnosis: the source line of every rank, in a warning and in the error of a collective.

Every collective runs inside a `collective_scope`, which records its caller. A thread posts the user's line
there, or the main thread's current line, to the store of the process group once a second; with more than a
thousand ranks less often, so that the store gets a thousand lines a second.
Rank 0 warns when ranks wait for long. When a collective fails in the backend, the error has the lines of all
ranks, and the other ranks raise it at their next collective. Slow ranks are reported as well; see
`accel_state.rank_status`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from accel_state.errors import StalledCollectiveError, first_line
from accel_state.process_group import clone_store, present_values
from accel_state.rank_status import SAMPLE_S, RankSampler, RankStatus, call_site, format_statuses

INTERVAL_S = 1.0  # between two posts
POSTS_PER_S = 1000  # of all ranks, which the store can take beside the run's own requests
WARN_AFTER_S = 60.0  # seconds of waiting before the first warning, and between two
NEAR_LIMIT = 0.9  # fraction of the limit, at which NCCL's watchdog ends the process without our message
SHUTDOWN_GRACE_S = 5.0  # seconds that rank 0 waits for the others to read its diagnosis

logger = logging.getLogger(__name__)

_active: HangMonitor | None = None


class collective_scope:  # noqa: N801 - used like a function, in `with`
    """Record the block as one collective of this rank.

    Scopes inside scopes count as part of the outermost.

    Args:
        operation: Name of the collective for errors, such as `"backward"`.

    Raises:
        StalledCollectiveError: On entry if a collective has timed out on another rank; on exit in place of
            an error of the backend: a time-out, a lost peer, ranks that call different operations.

    Example:
        >>> with collective_scope("all_reduce"):
        ...     pass
    """

    __slots__ = ("_monitor", "_operation")

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._monitor: HangMonitor | None = None

    def __enter__(self) -> None:
        monitor = _active
        if monitor is None or monitor.slot is not None:
            return
        if monitor.diagnosis is not None:
            raise StalledCollectiveError(monitor.diagnosis)
        self._monitor = monitor
        monitor.count += 1
        monitor.slot = sys._getframe(1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        try:
            if error is not None:
                _explain(monitor, self._operation, error)
        finally:
            monitor.slot = None


@contextmanager
def transport_errors_explained(operation: str) -> Generator[None]:
    """Explain a stall in code that mixes the user's computation with collectives, such as a pipeline.

    Unlike a `collective_scope` it does not count as a collective itself; the collectives inside do.

    Raises:
        StalledCollectiveError: In place of an error of the backend.
    """
    try:
        yield
    except RuntimeError as error:
        if _active is not None:
            _explain(_active, operation, error)
        raise


class HangMonitor:
    """The status of this rank, and the thread that posts it.

    Args:
        store: A separate connection to the job's store.
        limit: Seconds after which a collective times out in the backend.
        asynchronous: Whether collectives return before they are done, as on GPUs, so that a process that
            waits for them may be anywhere.

    Attributes:
        slot: The frame that has called the collective that runs.
        count: How many collectives this rank has begun.
        diagnosis: Why a collective has failed, on this or another rank.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, limit: float, asynchronous: bool = False
    ) -> None:
        self.slot: FrameType | None = None
        self.count = 0
        self.diagnosis: str | None = None
        self.asynchronous = asynchronous
        self.sampler: RankSampler | None = None
        self._store = PrefixStore("accel/hang_monitor", store)
        self._rank = rank
        self._ranks = range(world_size)
        self._interval = max(INTERVAL_S, world_size / POSTS_PER_S)
        self._heartbeat = 0
        self._unchanged: dict[int, tuple[Any, float]] = {}  # where each rank is, and since when
        self._warned = 0.0
        self._looked = 0.0
        self.set_limit(limit)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-hang-monitor", daemon=True)

    def set_limit(self, limit: float) -> None:
        """Set the seconds after which a collective times out in the backend."""
        self._limit = limit
        self._warn_after = min(WARN_AFTER_S, limit / 2)

    def name_stragglers(self, steps: Callable[[], int]) -> None:
        """Start to detect ranks that are slower than the others, and log them on rank 0.

        Args:
            steps: Returns how many optimizer steps this rank has done.
        """
        run = 0 if self.sampler is None else self.sampler.run + 1
        self.sampler = RankSampler(steps, str(Path(dist.__file__).parent), run)

    def start(self) -> None:
        """Start to post."""
        if self._rank == 0:
            for key in ("diagnosis", "collecting", "closing"):  # of an earlier monitor on the same store
                self._store.delete_key(key)
        self._thread.start()

    def stop(self, *, closing: bool = False) -> None:
        """Post that this rank exits, and end the thread.

        Args:
            closing: Whether this process may close the store. Rank 0 then waits until the others stop
                using it, about a second if they are still running.
        """
        self._closing.set()
        self._thread.join(timeout=5.0)
        if not closing or self._rank:
            return
        deadline = time.monotonic() + (1.5 * self._interval if self.diagnosis is None else SHUTDOWN_GRACE_S)
        try:
            self._store.set("closing", "")
            while time.monotonic() < deadline:
                if all(status is None or status.exited for status in self.statuses(self._ranks).values()):
                    return
                time.sleep(0.02)
        except RuntimeError as error:
            logger.debug("the store is already gone: %s", error)

    def explain(self, operation: str, error: BaseException) -> str:
        """Create the message of a collective that failed in the backend, and post it to the other ranks."""
        try:
            # One rank reads all statuses, and the others quote it, unless it leaves meanwhile.
            deadline = time.monotonic() + 5 * self._interval
            is_collecting = self._store.add("collecting", 1) == 1
            while not self._store.check(["diagnosis"]):
                if is_collecting or time.monotonic() > deadline:
                    self._store.compare_set("diagnosis", "", self._diagnose(operation))
                else:
                    time.sleep(self._interval / 4)
            self.diagnosis = self._store.get("diagnosis").decode()
        except RuntimeError:
            location, source = call_site(self.slot)
            self.diagnosis = self.diagnosis or (
                f"`{operation}` did not complete, and the store that knows where the others are is gone, "
                f"probably with rank 0; rank {self._rank} is at {location} `{source}`."
            )
        return f"{self.diagnosis} Rank {self._rank} heard from its backend: {first_line(error)}"

    def _diagnose(self, operation: str) -> str:
        """Return where all ranks are. A live one posts meanwhile: the heartbeat of any other stops."""
        before = self.statuses(self._ranks)
        time.sleep(2.5 * self._interval)
        self._post()  # on a busy machine the thread may not have come to it
        now = self.statuses(self._ranks)
        silent = {rank for rank in self._ranks if now[rank] is not None and now[rank] == before[rank]}
        return f"`{operation}` did not complete: {format_statuses(now, silent=silent)}."

    def statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus | None]:
        """Return the last status of each rank (`None` if it has none), in two requests if all have one."""
        texts = present_values(self._store, [f"{rank}" for rank in ranks])
        return {
            rank: RankStatus.from_text(texts[f"{rank}"]) if f"{rank}" in texts else None for rank in ranks
        }

    def _run(self) -> None:
        try:
            self._post()
            while not self._wait():
                is_last = self._store.check(["closing"])
                self.read_diagnosis()  # reads rank 0's last message, too
                if is_last:
                    break
                self._post()
                if self._rank == 0:
                    self._compare_ranks()
            self._post(exited=True)
        except RuntimeError as error:  # the store is gone, with the process that hosted it
            logger.debug("the hang monitor stops: %s", error)

    def _wait(self) -> bool:
        """Wait until the next post, and take samples meanwhile; return whether the monitor stops."""
        end = time.monotonic() + self._interval
        while (rest := end - time.monotonic()) > 0:
            if self._closing.wait(rest if self.sampler is None else min(rest, SAMPLE_S)):
                return True
            if self.sampler is not None:
                self.sampler.take(is_inside=self.slot is not None)
        return self._closing.is_set()

    def _post(self, *, exited: bool = False) -> None:
        slot = self.slot
        location, source = call_site(slot or sys._current_frames().get(threading.main_thread().ident or 0))
        self._heartbeat += 1
        status = RankStatus(
            rank=self._rank,
            heartbeat=self._heartbeat,
            location=location,
            source=source,
            collective=self.count,
            inside=slot is not None,
            exited=exited,
            host=socket.gethostname(),
            **(self.sampler.status_fields() if self.sampler is not None else {}),
        )
        self._store.set(f"{self._rank}", status.to_text())

    def read_diagnosis(self) -> None:
        """Read and log the diagnosis of another rank, if there is one; then collectives raise it."""
        if self.diagnosis is None and self._store.check(["diagnosis"]):
            diagnosis = self._store.get("diagnosis").decode()
            logger.error("Another rank gave up waiting: %s", diagnosis)
            self.diagnosis = diagnosis

    def _compare_ranks(self) -> None:
        """Log, on rank 0, where all ranks are if some wait for long, and which ranks are slow."""
        sampler, now = self.sampler, time.monotonic()
        is_due = sampler is not None and sampler.is_due()
        if not is_due and now - self._looked < self._warn_after / 8:
            return
        self._looked = now
        statuses = self.statuses(self._ranks)
        if sampler is not None and is_due and (line := sampler.compare(statuses)) is not None:
            logger.warning(line)
        waited = self._longest_wait([status for status in statuses.values() if status is not None], now)
        if waited < self._warn_after:
            self._warned = 0.0
        elif waited - self._warned >= self._warn_after:
            self._warned = waited
            logger.warning(
                "Waiting for %.0f s (limit %.0f s): %s.", waited, self._limit, format_statuses(statuses)
            )

    def _longest_wait(self, statuses: Sequence[RankStatus], now: float) -> float:
        """Return for how many seconds a rank has waited for others.

        Outside of collectives, a rank may compute for long. Where collectives are asynchronous, it may wait
        for the device there: if another rank has begun fewer collectives or has ended, or near the limit.
        """
        longest = 0.0
        fewest = min((-1 if status.exited else status.collective for status in statuses), default=0)
        for status in statuses:
            where = (status.collective, status.inside, status.location)
            if self._unchanged.get(status.rank, (None, now))[0] != where:
                self._unchanged[status.rank] = where, now
            waited = now - self._unchanged[status.rank][1]
            may_wait = fewest < status.collective or waited >= NEAR_LIMIT * self._limit
            if not status.exited and (status.inside or (self.asynchronous and may_wait)):
                longest = max(longest, waited)
        return longest


def active() -> HangMonitor | None:
    """Return the monitor of this process; `None` where nothing is monitored."""
    return _active


def begin(store: Any, *, rank: int, world_size: int, limit: timedelta, asynchronous: bool = False) -> None:
    """Start monitoring this rank if there are several ranks."""
    global _active  # noqa: PLW0603 - one monitor per process, which `collective_scope` must find fast
    end()
    if world_size == 1:
        return
    try:
        monitor = HangMonitor(
            clone_store(store),
            rank=rank,
            world_size=world_size,
            limit=limit.total_seconds(),
            asynchronous=asynchronous,
        )
        monitor.start()
    except RuntimeError as error:  # a third-party store; the run does not depend on the monitor
        logger.warning("Hangs will not be explained: the store of the process group fails (%s).", error)
    else:
        _active = monitor


def end(*, closing: bool = False) -> None:
    """Stop monitoring; do nothing if nothing is monitored.

    Args:
        closing: Whether this process may close the store, as when it destroys the process group.
    """
    global _active
    monitor, _active = _active, None
    if monitor is not None:
        monitor.stop(closing=closing)


def _after_fork() -> None:
    """Reset the monitor in a forked child, which has no thread."""
    global _active  # noqa: PLW0603 - see `begin`
    _active = None


def _explain(monitor: HangMonitor, operation: str, error: BaseException) -> None:
    """Re-raise an error of a backend or the store with the lines of all ranks; ignore any other error."""
    # gloo raises plain RuntimeErrors, which begin with a line of its own source.
    origin = str(error).partition("] ")[0] if type(error) is RuntimeError else ""
    of_gloo = origin.startswith("[") and "gloo/" in origin
    if of_gloo or isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        raise StalledCollectiveError(monitor.explain(operation, error)) from error


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
