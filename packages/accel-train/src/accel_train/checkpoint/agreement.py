"""All-gather JSON values over the process group's store, in any thread; let rank 0 go on alone.

Collectives do not do that: they belong to the main thread, and do not name the rank that is absent.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from accel_state import hang_monitor
from accel_state.errors import DistributedOperationException, StalledCollectiveError
from accel_state.hang_monitor import HangMonitor
from accel_state.process_group import clone_store, present_values
from accel_state.rank_status import RankStatus, format_ranks, format_statuses

if TYPE_CHECKING:
    from accel_state.runtime import Runtime


logger = logging.getLogger(__name__)


def make_all_gather(runtime: Runtime, channel: str, *, in_main_thread: bool) -> Agreement:
    """Return the all-gather of a run's ranks.

    Args:
        runtime: The runtime of this process.
        channel: Separates the exchanges of different threads.
        in_main_thread: As for `StoreAllGather`.
    """
    topology = runtime.topology
    if topology.world_size == 1:
        return SingleProcess()
    return StoreAllGather(
        clone_store(dist.distributed_c10d._get_default_store()),
        rank=topology.rank,
        world_size=topology.world_size,
        channel=channel,
        in_main_thread=in_main_thread,
    )


def first_problem(problems: Iterable[str]) -> str:
    """Return the first of the problems of all ranks, with its rank; empty if there is none."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


class SingleProcess:
    """The all-gather of a run with one process."""

    world_size = 1

    def exchange(self, operation: str, value: Any, *, last: bool = False, alone: Any = None) -> list[Any]:
        """Return the value alone."""
        del operation, last, alone
        return [value]


class AbsentRankError(DistributedOperationException):
    """Rank 0 goes on alone: on rank 0, why the other ranks will not join; on these, that they came late."""


MIN_PAUSE_S = 0.001  # between two polls of the store, at first
MAX_PAUSE_S = 1.0  # after ten seconds
MAX_POLLS_PER_S = 20_000  # of all ranks together, at first


class StoreAllGather:
    """An all-gather of JSON values over a store; each thread needs an instance of its own.

    Every rank makes a constant number of requests, and while it waits a constant number per second, whatever
    the number of ranks: rank 0 collects the values, and stores all of them as one for the other ranks.

    Args:
        store: A connection to the store of the process group that no other thread waits on.
        channel: Separates the exchanges of different threads.
        in_main_thread: Whether the main thread of every rank takes part: a rank whose main thread waits for
            something else will never join.
        monitor: Returns the hang monitor that knows where absent ranks are.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        channel: str,
        in_main_thread: bool,
        monitor: Callable[[], HangMonitor | None] = hang_monitor.active,
    ) -> None:
        self._in_main_thread = in_main_thread
        self._store = PrefixStore(f"accel/checkpoint/{channel}", store)
        self._rank = rank
        self.world_size = world_size
        self._monitor = monitor
        self._was_alone = False
        self._answered: list[int] = []  # the rounds whose values rank 0 has stored
        # The store keeps the count: a second Accelerator of the process continues it.
        self._round = self._store.add(f"rounds/{rank}", 0)

    def exchange(self, operation: str, value: Any, *, last: bool = False, alone: Any = None) -> list[Any]:
        """All-gather a JSON value, in rank order.

        Args:
            operation: The name of the operation, for messages.
            value: This rank's value.
            last: Whether nothing is exchanged afterwards, so that the process that keeps the store may end.
            alone: A JSON value that describes the operation, if rank 0 may do it alone.

        Raises:
            AbsentRankError: Rank 0 does it alone. The error is raised there, and on ranks that come later.
            DistributedOperationException: A rank has ended or died.
        """
        try:
            while True:
                self._round = self._store.add(f"rounds/{self._rank}", 1)
                round_name = f"{self._round}"
                self._store.set(f"{round_name}/{self._rank}", json.dumps(value))
                if self._rank == 0:
                    values = self._collect(operation, round_name, alone)
                else:
                    values = self._receive(operation, round_name)
                if not isinstance(values, dict):
                    break
                self._uncount()  # rank 0 has done something alone in this round
                if alone is not None and values["alone"] == alone:
                    raise AbsentRankError(f"{operation} was called on rank 0 long before this rank")
            if last:
                self._leave(operation, round_name)
        except DistributedOperationException:
            raise
        except RuntimeError as error:  # older torch has no type for errors of a store
            raise DistributedOperationException(
                f"{operation}: the store of the process group cannot be reached: rank 0, which hosts "
                "it, has exited or failed"
                f" ({str(error).splitlines()[0]})."
            ) from error
        return values

    def _collect(self, operation: str, round_name: str, alone: Any) -> list[Any]:
        """On rank 0: collect the values of all ranks, and store them for the other ranks."""
        keys = [f"{round_name}/{rank}" for rank in range(self.world_size)]
        try:
            self._wait(operation, keys, may_be_alone=alone is not None)
        except AbsentRankError:
            self._was_alone = True
            self._store.set(f"{round_name}/all", json.dumps({"alone": alone}))
            self._answered.append(self._round)
            self._uncount()
            raise
        except DistributedOperationException as error:
            # The other ranks read the error, also those that are late.
            self._store.set(f"{round_name}/all", json.dumps(str(error)))
            raise DistributedOperationException(str(error)) from error
        self._was_alone = False
        values = [json.loads(text) for text in present_values(self._store, keys).values()]
        self._store.set(f"{round_name}/all", json.dumps(values))
        self._store.delete_key(f"{round_name}/0")
        for finished in self._answered:  # every rank has read them
            for part in ("all", "left"):
                self._store.delete_key(f"{finished}/{part}")
        self._answered = [self._round]
        return values

    def _receive(self, operation: str, round_name: str) -> list[Any] | dict[str, Any]:
        """On the other ranks: wait for the values that rank 0 has collected, or what it does alone."""
        self._wait(operation, [f"{round_name}/all"])
        values: list[Any] | dict[str, Any] | str = json.loads(self._store.get(f"{round_name}/all"))
        self._store.delete_key(f"{round_name}/{self._rank}")  # rank 0 has read it
        if isinstance(values, str):
            raise DistributedOperationException(values)
        return values

    def _uncount(self) -> None:
        """Undo the count of a collective that other ranks have not begun."""
        monitor = self._monitor()
        if self._in_main_thread and monitor is not None:
            monitor.count -= 1

    def _leave(self, operation: str, round_name: str) -> None:
        """Return on rank 0, whose process keeps the store, after all other ranks."""
        if self._rank:
            self._store.add(f"{round_name}/left", 1)
            return
        stragglers = self._stragglers(operation, in_main_thread=False)
        for _ in self._pauses():
            if self._store.add(f"{round_name}/left", 0) >= self.world_size - 1:
                return
            if stragglers.is_due():
                stragglers.poll(range(1, self.world_size))

    def _wait(self, operation: str, keys: list[str], *, may_be_alone: bool = False) -> None:
        """Wait for keys: on rank 0 those of all ranks, elsewhere the answer of rank 0."""
        stragglers = self._stragglers(
            operation, in_main_thread=self._in_main_thread, may_be_alone=may_be_alone
        )
        with hang_monitor.collective_scope(operation) if self._in_main_thread else nullcontext():
            for _ in self._pauses():
                if self._store.check(keys):
                    return
                if not stragglers.is_due():
                    continue
                if self._rank == 0:
                    absent = set(keys) - present_values(self._store, keys).keys()
                    stragglers.poll(sorted(int(key.rpartition("/")[2]) for key in absent))
                else:
                    stragglers.poll([0])

    def _stragglers(
        self, operation: str, *, in_main_thread: bool, may_be_alone: bool = False
    ) -> StragglerMonitor:
        return StragglerMonitor(
            operation,
            self._monitor(),
            rank=self._rank,
            world_size=self.world_size,
            in_main_thread=in_main_thread,
            may_be_alone=may_be_alone,
            is_usual=self._was_alone,
        )

    def _pauses(self) -> Iterator[None]:
        """Yield at once, then after pauses of a tenth of the time that has passed, of a second at most."""
        began = time.monotonic()
        shortest = max(MIN_PAUSE_S, self.world_size / MAX_POLLS_PER_S)
        while True:
            yield
            time.sleep(min(max(shortest, (time.monotonic() - began) / 10), MAX_PAUSE_S))


Agreement = SingleProcess | StoreAllGather
STUCK_S = 3.0  # in another collective, after which rank 0 goes on alone if it may
SILENT_S = 60.0  # without a heartbeat, after which a rank is taken to be dead
WARN_AFTER_S = 30.0  # of waiting
POLL_S = 0.5  # between two polls; more where so many ranks share the store that they post less often
RANKS_PER_S = 200  # that post their status in a second, as in the hang monitor


_DEAD = "does not respond"
_ENDED = "has ended"


class StragglerMonitor:
    """Detect ranks that have ended or died, from their last status; and whether rank 0 is alone.

    Where a rank is never proves that it will not come, so that rank 0 tells those that do come.

    Args:
        operation: The name of the operation, for messages.
        monitor: The hang monitor, with the statuses of all ranks; `None` where nothing is monitored.
        rank: This rank. Rank 0 reads the statuses of all ranks before it raises; the other ranks, of which
            there may be thousands, read those of rank 0 and themselves.
        in_main_thread: Whether a rank that has ended can no longer join.
        may_be_alone: Whether rank 0 goes on alone where all others are in another collective, or have ended.
        is_usual: Whether no rank joined the last time: that a rank is in another collective is then enough.
    """

    def __init__(
        self,
        operation: str,
        monitor: HangMonitor | None,
        *,
        rank: int,
        world_size: int,
        in_main_thread: bool,
        may_be_alone: bool = False,
        is_usual: bool = False,
    ) -> None:
        self._operation = operation
        self._monitor = monitor
        self._is_usual = is_usual
        self._rank = rank
        self._shown: Sequence[int] = range(world_size) if rank == 0 else (0, rank)
        self._in_main_thread = in_main_thread
        self._may_be_alone = may_be_alone
        self._pause = max(POLL_S, world_size / RANKS_PER_S)
        self._began = self._polled = time.monotonic()
        self._warned = rank > 1  # rank 1 warns for all ranks that wait for rank 0
        self._seen: dict[int, tuple[tuple[int, str] | None, float, int, float]] = {}

    def is_due(self) -> bool:
        """Return whether it is time to poll again."""
        return self._monitor is not None and time.monotonic() - self._polled >= self._pause

    def poll(self, missing: Sequence[int]) -> None:
        """Read the last statuses of the ranks that are waited for.

        Raises:
            AbsentRankError: Rank 0 may be alone, and is.
            DistributedOperationException: A rank has ended or died.
            StalledCollectiveError: A collective has timed out on another rank.
        """
        if self._monitor is None:
            return
        now = self._polled = time.monotonic()
        reasons = {
            rank: None if status is None else self._judge(status, self._monitor, now)
            for rank, status in self._monitor.statuses(missing).items()
        }
        if _ENDED in reasons.values():
            self._monitor.read_diagnosis()  # a rank that ends because a collective has failed says so before
        if self._in_main_thread and self._monitor.diagnosis is not None:
            raise StalledCollectiveError(f"{self._operation}: {self._monitor.diagnosis}")
        may_be_alone = self._may_be_alone and len(missing) == len(self._shown) - 1
        is_alone = may_be_alone and None not in reasons.values() and _DEAD not in reasons.values()
        for rank, reason in reasons.items():
            if is_alone or reason == _DEAD or (reason == _ENDED and not may_be_alone):
                kind = AbsentRankError if is_alone else DistributedOperationException
                raise kind(
                    f"{self._operation} must be called on every rank, but rank {rank} {reason}: "
                    f"{format_statuses(self._monitor.statuses(self._shown))}."
                )
        if now - self._began >= WARN_AFTER_S and not self._warned:
            self._warned = True
            statuses = self._monitor.statuses(self._shown)
            logger.warning(
                "%s waits for %s: %s.", self._operation, format_ranks(missing), format_statuses(statuses)
            )

    def _judge(self, status: RankStatus, monitor: HangMonitor, now: float) -> str | None:
        """Return why a rank seems never to join, if it does."""
        # It must have been in another collective, which needs this rank, for a while: statuses may be late.
        passed = status.collective >= monitor.count and (status.inside or monitor.asynchronous)
        timeout = 0.0 if self._is_usual else STUCK_S
        location = (status.collective, status.location) if passed else None
        old_location, since, heartbeat, beat_at = self._seen.get(status.rank, (None, now, -1, now))
        since = since if location is not None and location == old_location else now
        beat_at = beat_at if status.heartbeat == heartbeat else now
        self._seen[status.rank] = (location, since, status.heartbeat, beat_at)
        if self._in_main_thread and status.exited:
            return _ENDED
        if self._may_be_alone and location is not None and now - since >= timeout:
            return "waits elsewhere"
        return _DEAD if now - beat_at >= SILENT_S else None
