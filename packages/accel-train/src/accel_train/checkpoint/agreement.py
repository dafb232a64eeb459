"""Ranks agree through the store.

Not through collectives: those belong to the main thread, end in the process group's timeout, and say nothing
about a rank that never came.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel_state import hang_monitor
from accel_state.collectives import default_store
from accel_state.errors import DistributedOperationException, StalledCollectiveError
from accel_state.hang_monitor import HangMonitor
from accel_state.process_group import absent_keys, clone_store, get_all
from accel_state.rank_status import RankStatus, format_ranks, format_statuses

if TYPE_CHECKING:
    from accel_state.runtime import Runtime


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


MIN_PAUSE_S = 0.001  # between two looks into the store, at first
MAX_PAUSE_S = 1.0  # and after ten seconds
MAX_POLLS_PER_S = 20_000  # of all ranks together, at first


class SingleProcess:
    """The agreement of a process that is alone."""

    def exchange(self, operation: str, value: Any, *, last: bool = False) -> list[Any]:
        """The value alone."""
        del operation, last
        return [value]


class StoreAllGather:
    """An all-gather of JSON values over a store. Each thread that agrees needs one of its own.

    Every rank makes a constant number of requests, and while it waits a constant number per second, whatever
    the number of ranks: rank 0 collects, and puts all values into one that each of the others reads.

    Args:
        store: A connection to the store of the process group that no other thread waits on.
        channel: Tells apart what different threads agree on.
        in_main_thread: Whether the main thread of every rank takes part, so that a rank whose main thread
            waits for something else will not come.
        monitor: Gets what tells where ranks are that do not come.
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
        self._world_size = world_size
        self._monitor = monitor
        # Counted in the store: makers of several accelerators in a process count on.
        self._round = self._store.add(f"rounds/{rank}", 0)

    def exchange(self, operation: str, value: Any, *, last: bool = False) -> list[Any]:
        """Tell the others a value, and get those of all ranks, in rank order.

        Args:
            operation: What all ranks are doing, for the messages.
            value: What this rank says, in the types of JSON.
            last: Whether nothing is exchanged afterwards, so that the process that keeps the store may end.

        Raises:
            DistributedOperationException: Another rank is elsewhere and will not come, or is gone.
        """
        self._round = self._store.add(f"rounds/{self._rank}", 1)
        round_name = f"{self._round}"
        try:
            self._store.set(f"{round_name}/{self._rank}", json.dumps(value))
            values = (self._receive if self._rank else self._collect)(operation, round_name)
            if last:
                self._leave(operation, round_name)
        except DistributedOperationException:
            raise
        except RuntimeError as error:  # the errors of a store have no type of their own in older torch
            raise DistributedOperationException(
                f"{operation}: the store of the process group cannot be reached; rank 0, which keeps it, has "
                f"ended or failed ({str(error).splitlines()[0]})."
            ) from error
        return values

    def _collect(self, operation: str, round_name: str) -> list[Any]:
        """On rank 0: get the values of all, and hand them out."""
        keys = [f"{round_name}/{rank}" for rank in range(self._world_size)]
        try:
            self._wait(operation, keys)
        except DistributedOperationException as error:
            if len(absent_keys(self._store, keys)) < self._world_size - 1:
                # Also for those who come too late.
                self._store.set(f"{round_name}/all", json.dumps(str(error)))
            else:
                self._delete_round(round_name)
            raise
        values = [json.loads(text) for text in get_all(self._store, keys)]
        self._store.set(f"{round_name}/all", json.dumps(values))
        self._store.delete_key(f"{round_name}/0")
        for part in ("all", "left"):  # everyone is through with the round before
            self._store.delete_key(f"{self._round - 1}/{part}")
        return values

    def _receive(self, operation: str, round_name: str) -> list[Any]:
        """On the other ranks: wait for what rank 0 hands out."""
        try:
            self._wait(operation, [f"{round_name}/all"])
        except DistributedOperationException:
            self._delete_round(round_name)
            raise
        values: list[Any] | str = json.loads(self._store.get(f"{round_name}/all"))
        self._store.delete_key(f"{round_name}/{self._rank}")  # rank 0 has read it
        if isinstance(values, str):
            raise DistributedOperationException(values)
        return values

    def _delete_round(self, round_name: str) -> None:
        """Undo a call that nobody has answered, so that ranks count alike if they go on after the error."""
        self._store.delete_key(f"{round_name}/{self._rank}")
        self._store.add(f"rounds/{self._rank}", -1)

    def _leave(self, operation: str, round_name: str) -> None:
        """Let the process that keeps the store be the last to go."""
        if self._rank:
            self._store.add(f"{round_name}/left", 1)
            return
        stragglers = self._stragglers(operation, compare_locations=False)
        for _ in self._pauses():
            if self._store.add(f"{round_name}/left", 0) >= self._world_size - 1:
                return
            if stragglers.is_due():
                stragglers.poll(range(1, self._world_size))

    def _wait(self, operation: str, keys: list[str]) -> None:
        """Wait for keys: on rank 0 those of all ranks, elsewhere the answer of rank 0."""
        stragglers = self._stragglers(operation, compare_locations=self._in_main_thread)
        with hang_monitor.collective_scope(operation) if self._in_main_thread else nullcontext():
            for _ in self._pauses():
                if self._store.check(keys):
                    return
                if stragglers.is_due():
                    absent = absent_keys(self._store, keys) if self._rank == 0 else ["0"]
                    stragglers.poll([int(key.rpartition("/")[2]) for key in absent])

    def _stragglers(self, operation: str, *, compare_locations: bool) -> StragglerMonitor:
        return StragglerMonitor(
            operation,
            self._monitor(),
            rank=self._rank,
            world_size=self._world_size,
            compare_locations=compare_locations,
        )

    def _pauses(self) -> Iterator[None]:
        """Yield at once, then after pauses of a tenth of the time that has passed, of a second at most."""
        began = time.monotonic()
        shortest = max(MIN_PAUSE_S, self._world_size / MAX_POLLS_PER_S)
        while True:
            yield
            time.sleep(min(max(shortest, (time.monotonic() - began) / 10), MAX_PAUSE_S))


Agreement = SingleProcess | StoreAllGather


def make_all_gather(runtime: Runtime, channel: str, *, in_main_thread: bool) -> Agreement:
    """The agreement of the processes of a run."""
    topology = runtime.topology
    if topology.world_size == 1:
        return SingleProcess()
    return StoreAllGather(
        clone_store(default_store()),
        rank=topology.rank,
        world_size=topology.world_size,
        channel=channel,
        in_main_thread=in_main_thread,
    )
