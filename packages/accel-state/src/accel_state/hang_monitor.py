"""Hang diagnosis: the source line of every rank, in a warning and in the error of a collective.

Every collective runs inside a `collective_scope`, which records the user's line in about a microsecond. A
thread posts that line, or the main thread's current line, to the store of the process group about once a
second. When a collective times out in the backend, the error lists the statuses of all ranks. Ranks that are
slower than the others are reported as well; see `accel_state.stragglers`.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] - documented
    Store,  # pyright: ignore[reportPrivateImportUsage] - documented
)

from accel_state.errors import DistributedOperationException, StalledCollectiveError
from accel_state.process_group import absent_keys, clone_store, get_all
from accel_state.rank_status import RankStatus, call_site, format_statuses, main_thread_site, source_location
from accel_state.stragglers import RankSampler

WARN_AFTER_S = 60.0  # seconds of waiting before the first warning
LAST_WARNING = 0.9  # fraction of the limit, at which NCCL's watchdog ends the process without our message
INTERVAL_S = 1.0  # between two polls of the store; adapted to the world size and the limit
MIN_POLL_S = 1.0  # seconds within which every live rank posts, even on a busy machine
SHUTDOWN_GRACE_S = 5.0  # seconds that rank 0 waits for the others to read its diagnosis

# Transport errors have such a type or origin; other timeouts, as of a download by the program, do not.
_TYPES = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
# gloo's errors are plain RuntimeErrors that begin with a line of gloo's own source.
_GLOO = re.compile(r"\[(?P<enforced>enforce fail at )?\S*\bgloo/\S+:\d+\] ")
_NCCL_STALL = re.compile(r"timed? ?out|connection|remote|peer|system error|aborted", re.IGNORECASE)

logger = logging.getLogger(__name__)

_Slot = tuple[int, str, "tuple[CodeType, int] | None"]
_active: HangMonitor | None = None


class collective_scope:  # noqa: N801 - used like a function, in `with`
    """Record the block as one collective of this rank.

    Costs nothing in a single process, and about a microsecond otherwise. Scopes inside scopes count as
    part of the outermost.

    Args:
        operation: Name of the collective, for code without source text, such as `"backward"`.

    Raises:
        StalledCollectiveError: On entry if a collective has timed out on another rank; on exit in place of
            the backend's timeout error.
        DistributedOperationException: On exit in place of another error of the backend, as when ranks call
            different operations.

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
        monitor.failed = None
        monitor.count = number = monitor.count + 1
        monitor.slot = (number, self._operation, call_site(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage] - public in all but name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        monitor = self._monitor
        if monitor is None:
            return
        if error is None:
            monitor.slot = None
            return
        monitor.failed = monitor.slot
        try:
            _explain(monitor, self._operation, error)
        finally:
            monitor.slot = None


@contextmanager
def transport_errors_explained(operation: str) -> Generator[None]:
    """Explain a stall in code that mixes the user's computation with collectives, such as a pipeline.

    Unlike a `collective_scope` it does not count as a collective itself; the collectives inside do.

    Raises:
        StalledCollectiveError: In place of the transport's error when a collective timed out.
        DistributedOperationException: In place of another error of the transport.
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
        polls (list[Callable[[], None]]): Further short, non-blocking callbacks of each poll.
    """

    def __init__(
        self, store: Store, *, rank: int, world_size: int, limit: float, asynchronous: bool = False
    ) -> None:
        self.slot: _Slot | None = None
        self.failed: _Slot | None = None  # the last collective, if it raised
        self.count = 0
        self.diagnosis: str | None = None
        self._store = PrefixStore("accel/hang_monitor", store)
        self._rank = rank
        self._world_size = world_size
        self.asynchronous = asynchronous
        self._heartbeat = 0
        self._stalled: tuple[Any, float] = (None, 0.0)
        self._warns: bool | None = None
        self._claim: str | None = None
        self.set_limit(limit)
        self.polls: list[Callable[[], None]] = []
        self.sampler: RankSampler | None = None
        self._host = socket.gethostname()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-hang-monitor", daemon=True)

    def set_limit(self, limit: float) -> None:
        """Set the seconds after which a collective times out in the backend."""
        # About once a second, less often where a thousand ranks share one store, more often for short limits.
        self.interval = min(max(INTERVAL_S, self._world_size / 200), max(0.05, limit / 5))
        self._limit = limit
        self._warn_after = self._first_warning = min(WARN_AFTER_S, limit / 2)

    def uncount(self) -> None:
        """Undo the count of the last collective, which no other rank has joined."""
        self.count -= 1

    def name_stragglers(self, steps: Callable[[], int]) -> None:
        """Start to detect ranks that are slower than the others, and log them on rank 0.

        Args:
            steps: Returns how many optimizer steps this rank has done.
        """
        run = 1 if self.sampler is None else self.sampler.run + 1
        self.sampler = RankSampler(steps, str(Path(dist.__file__).parent), run)

    def start(self) -> None:
        """Start to post heartbeats."""
        if self._rank == 0:
            for key in ("diagnosis", "explaining", "closing"):  # of an earlier monitor on the same store
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
        if closing and self._rank == 0:
            try:
                self._close_store()
            except RuntimeError as error:
                logger.debug("the store is already gone: %s", error)

    def on_timeout(self, operation: str, error: BaseException) -> str:
        """Create the error message of a collective that timed out, and post it to the other ranks."""
        reason = first_sentence(error)
        self._warn_after = float("inf")
        try:
            # Only the first rank to time out reads the statuses of all ranks; the others quote its message:
            # thousands may time out at once, and each would read thousands of statuses.
            if self._store.add("explaining", 1) > 1:
                # Wait for the diagnosis of another rank, unless that rank exits.
                deadline = time.monotonic() + 2 * self._poll_interval + SHUTDOWN_GRACE_S
                self._poll_diagnosis()
                while self.diagnosis is None and time.monotonic() < deadline:
                    time.sleep(self._poll_interval / 8)
                    self._poll_diagnosis()
            diagnosis = self.diagnosis or f"`{operation}` did not complete: {self._explanation()}."
            agreed = self._store.compare_set("diagnosis", "", diagnosis).decode() or diagnosis
        except RuntimeError:
            location, source = source_location(self.slot[2] if self.slot else None)
            agreed = self.diagnosis or (
                f"`{operation}` did not complete, and the store that knows where the others are is gone, "
                f"probably with rank 0; rank {self._rank} is at {location} `{source}`."
            )
        self.diagnosis = agreed
        return f"{agreed} Rank {self._rank} heard from its backend: {reason}."

    @property
    def _poll_interval(self) -> float:
        """Seconds within which every live rank posts."""
        return max(2.5 * self.interval, MIN_POLL_S)

    def _explanation(self) -> str:
        """Describe all ranks; wait a few intervals to find ranks without a heartbeat."""
        ranks = range(self._world_size)
        before = self.statuses(ranks)
        time.sleep(self._poll_interval)
        now = self.statuses(ranks)
        silent = [
            rank
            for rank, old in before.items()
            if old is not None
            and (new := now[rank]) is not None
            and new.heartbeat == old.heartbeat
            and not new.exited
        ]
        return format_statuses(now, silent=silent)

    def _run(self) -> None:
        try:
            self._post()
            self._store.add("started", 1)
            while not self._wait():
                closing = self._store.check(["closing"])
                self._poll_diagnosis()  # reads rank 0's last message, too
                if closing:
                    break
                self._post()
                self._warn()
                self._compare_ranks()
                for poll in self.polls:
                    poll()
            self._post(exited=True)
            self._store.add("exited", 1)
        except RuntimeError as error:  # the store is gone, with the process that hosted it
            logger.debug("the hang explainer stops: %s", error)

    def _wait(self) -> bool:
        """Wait until the next post, and take samples meanwhile; return whether the monitor stops."""
        end = time.monotonic() + self.interval
        while (sampler := self.sampler) is not None and time.monotonic() < end:
            if self._closing.wait(sampler.pause()):
                return True
            sampler.take(is_inside=self.slot is not None)
        return self._closing.wait(max(0.0, end - time.monotonic()))

    def _compare_ranks(self) -> None:
        """Log slow ranks, on rank 0 only, from the statuses that all ranks post anyway."""
        sampler, now = self.sampler, time.monotonic()
        if self._rank == 0 and sampler is not None and sampler.is_due(now):
            line = sampler.compare(self.statuses(range(self._world_size)), now)
            if line is not None:
                logger.warning(line)

    def _post(self, *, exited: bool = False) -> None:
        slot, failed = self.slot, self.failed
        location, source = source_location(slot[2] if slot is not None else main_thread_site())
        self._heartbeat += 1
        status = RankStatus(
            rank=self._rank,
            heartbeat=self._heartbeat,
            location=location,
            source=source,
            collective=self.count,
            inside=slot is not None,
            exited=exited,
            failed=source_location(failed[2])[0] if failed is not None else "",
            host=self._host,
            **(self.sampler.status_fields() if self.sampler is not None else {}),
        )
        self._store.set(f"{self._rank}", status.to_text())

    def _poll_diagnosis(self) -> None:
        if self.diagnosis is None and self._store.check(["diagnosis"]):
            diagnosis = self._store.get("diagnosis").decode()
            logger.error("Another rank gave up waiting: %s", diagnosis)
            self.diagnosis = diagnosis  # from now on collectives raise, with the reason in the log

    def _warn(self) -> None:
        """Log all statuses while this rank makes no progress, less and less often, and before the limit."""
        slot, now = self.slot, time.monotonic()
        current = (self.count, main_thread_site()) if slot is None and self.asynchronous else slot
        if current is None or current != self._stalled[0]:
            if self._warns and self._claim is not None:
                self._store.delete_key(self._claim)
            self._claim = None
            self._stalled, self._warns, self._warn_after = (current, now), None, self._first_warning
            return
        waited = now - self._stalled[1]
        if waited < self._warn_after:
            return
        self._warn_after = next_warning(waited, self._limit)
        if self._warns is None:  # only one of the ranks that wait for the same collective warns
            self._claim, own = f"warned/{self.count}", f"{self._rank}"
            self._warns = self._store.compare_set(self._claim, "", own) == own.encode()
        if not self._warns:
            return
        statuses = self.statuses(range(self._world_size))
        # Outside of collectives a process may compute for long: warn only if other ranks wait, that is, if a
        # rank has begun fewer collectives, or has ended.
        if slot is None and waited < LAST_WARNING * self._limit:
            known = [status for status in statuses.values() if status is not None]
            if not any(status.exited or status.collective < self.count for status in known):
                return
        self._claim = None
        logger.warning(
            "Waiting for %.0f s in `%s` (limit %.0f s): %s.",
            waited,
            slot[1] if slot is not None else "the work of the device",
            self._limit,
            format_statuses(statuses),
        )

    def statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus | None]:
        """Return the last status of each rank (`None` if it has none), in two requests if all have one."""
        absent = set(absent_keys(self._store, [f"{rank}" for rank in ranks]))
        present = [f"{rank}" for rank in ranks if f"{rank}" not in absent]
        texts = dict(zip(present, get_all(self._store, present), strict=True))
        return {
            rank: RankStatus.from_text(texts[f"{rank}"]) if f"{rank}" in texts else None for rank in ranks
        }

    def _close_store(self) -> None:
        self._store.set("closing", "")
        # A busy machine needs time until every rank has read the diagnosis of a stall.
        deadline = time.monotonic() + (1.5 * self.interval if self.diagnosis is None else SHUTDOWN_GRACE_S)
        while time.monotonic() < deadline:
            if self._store.add("exited", 0) >= self._store.add("started", 0):
                return
            time.sleep(0.02)


def next_warning(waited: float, limit: float) -> float:
    """Return the waiting time in seconds of the next warning: twice as long, but once near the limit.

    Example:
        >>> [next_warning(waited, 600) for waited in (60, 480, 540)]
        [120, 540.0, 1080]
    """
    last = LAST_WARNING * limit
    return min(2 * waited, last) if waited < last else 2 * waited


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
    """Re-raise a transport error with the statuses of all ranks; ignore any other error."""
    if is_transport_error(error):
        wrapped = StalledCollectiveError if is_stall(error) else DistributedOperationException
        raise wrapped(monitor.on_timeout(operation, error)) from error


def is_transport_error(error: BaseException | None) -> bool:
    """Return whether an error was raised by a process-group backend or by the store.

    Example:
        >>> is_transport_error(RuntimeError("request timed out"))
        False
        >>> is_transport_error(RuntimeError("[/gloo/transport/tcp/pair.cc:561] Connection closed by peer"))
        True
    """
    return isinstance(error, _TYPES) or (type(error) is RuntimeError and _GLOO.match(str(error)) is not None)


def is_stall(error: BaseException) -> bool:
    """Return whether a transport error means that another rank did not join, not that ranks disagree.

    Example:
        >>> is_stall(RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:464] 8 vs 4"))
        False
    """
    origin = _GLOO.match(str(error))
    if origin is not None:
        return origin["enforced"] is None
    return not isinstance(error, dist.DistBackendError) or _NCCL_STALL.search(str(error)) is not None


def first_sentence(error: BaseException) -> str:
    """Return the message of a transport error, without its source location and advice.

    Example:
        >>> first_sentence(RuntimeError("[/gloo/transport/tcp/pair.cc:561] Read error. Look elsewhere"))
        'Read error'
    """
    line = re.sub(r"^\[[^\]]*\] ", "", (str(error).strip().splitlines() or [""])[0])
    return line.split(". ")[0].rstrip(".") or type(error).__name__


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
