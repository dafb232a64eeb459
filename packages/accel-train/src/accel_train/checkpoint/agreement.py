"""All-gather JSON values over the process group's store, in any thread; let rank 0 go on alone.

Collectives do not do that: they belong to the main thread, and do not name the rank that is absent.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import PrefixStore

from accel_state import hang_monitor
from accel_state.errors import CheckpointError, DistributedOperationException, StalledCollectiveError
from accel_state.hang_monitor import HangMonitor
from accel_state.process_group import clone_store, present_values
from accel_state.rank_status import format_statuses

if TYPE_CHECKING:
    from accel_state.runtime import Runtime


def make_all_gather(runtime: Runtime, channel: str, *, in_main_thread: bool) -> Agreement:
    """Return the all-gather of a run's ranks, with the arguments of `StoreAllGather`."""
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


@contextmanager
def raising_everywhere(
    agreement: Agreement, operation: str, kind: type[Exception] = CheckpointError
) -> Generator[None]:
    """Raise the error of a block on this rank, or a `kind` that names that of another one."""
    try:
        yield
    except Exception as error:  # hooks and state dicts are users' code, and all ranks need the error
        agreement.exchange(operation, f"{type(error).__name__}: {error}")
        raise
    problem = first_problem(agreement.exchange(operation, ""))
    if problem:
        raise kind(problem)


class SingleProcess:
    """The all-gather of a run with one process."""

    world_size = 1

    def exchange(
        self, operation: str, value: Any, *, last: bool = False, alone: Any = None, public: Any = None
    ) -> list[Any]:
        """Return the value alone."""
        del operation, last, alone, public
        return [value]


class AbsentRankError(DistributedOperationException):
    """Rank 0 goes on alone: on rank 0, why the other ranks will not join; on these, that they came late."""


STUCK_S = 3.0  # in another collective, after which rank 0 goes on alone if it may
SILENT_S = 60.0  # without a heartbeat, after which a rank is taken to be dead
POLL_S = 0.5  # between two looks at ranks; more where so many share the store that they post less often
RANKS_PER_S = 200  # that post their status in a second, as in the hang monitor

_DEAD = "does not respond"
_ENDED = "has ended"
_ELSEWHERE = "waits elsewhere"


class StoreAllGather:
    """An all-gather of JSON values over a store; each thread needs an instance of its own.

    Every rank makes a constant number of requests, whatever the number of ranks: rank 0 collects the values,
    and stores all of them as one for the other ranks, equal ones of consecutive ranks once. Where a rank is
    never proves that it will not come, so that rank 0 tells those that come late what it has done alone.

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

    def exchange(
        self,
        operation: str,
        value: Any,
        *,
        last: bool = False,
        alone: Any = None,
        public: Callable[[list[Any]], list[Any]] = list,
    ) -> list[Any]:
        """All-gather a JSON value, in rank order.

        Args:
            operation: The name of the operation, for messages.
            value: This rank's value.
            last: Whether nothing is exchanged afterwards, so that the process that keeps the store may end.
            alone: A JSON value that describes the operation, if rank 0 may do it alone.
            public: Returns what the other ranks get of the values, all of which rank 0 has.

        Raises:
            AbsentRankError: Rank 0 does it alone. The error is raised there, and on ranks that come later.
            DistributedOperationException: A rank has ended or died.
        """
        try:
            while True:
                self._round = self._store.add(f"rounds/{self._rank}", 1)
                self._store.set(f"{self._round}/{self._rank}", json.dumps(value))
                values = self._receive(operation) if self._rank else self._collect(operation, alone, public)
                if not isinstance(values, dict):
                    break
                self._uncount()  # rank 0 has done something alone in this round
                if alone is not None and values["alone"] == alone:
                    raise AbsentRankError(f"{operation} was called on rank 0 long before this rank")
            if last:
                self._leave(operation)
        except DistributedOperationException:
            raise
        except RuntimeError as error:  # older torch has no type for errors of a store
            raise DistributedOperationException(
                f"{operation}: the store of the process group cannot be reached: rank 0, which hosts it, "
                f"has exited or failed ({str(error).splitlines()[0]})."
            ) from error
        return values

    def _collect(self, operation: str, alone: Any, public: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """On rank 0: collect the values of all ranks; store them for the others, or why there are none."""
        keys = [f"{self._round}/{rank}" for rank in range(self.world_size)]
        answer = f"{self._round}/all"
        try:
            self._wait(operation, keys, may_be_alone=alone is not None)
        except DistributedOperationException as error:
            self._was_alone = isinstance(error, AbsentRankError)
            self._store.set(answer, json.dumps({"alone": alone} if self._was_alone else str(error)))
            if self._was_alone:
                self._answered.append(self._round)
                self._uncount()
            raise
        self._was_alone = False
        values = [json.loads(text) for text in present_values(self._store, keys).values()]
        runs = [[value, len([*equal])] for value, equal in groupby(public(values))]
        self._store.set(answer, json.dumps(runs))
        self._store.delete_key(keys[0])
        for finished in self._answered:  # every rank has read them
            for part in ("all", "left", "empty"):
                self._store.delete_key(f"{finished}/{part}")
        self._answered = [self._round]
        return values

    def _receive(self, operation: str) -> list[Any] | dict[str, Any]:
        """On the other ranks: wait for the values that rank 0 has collected, or what it does alone."""
        self._wait(operation, [f"{self._round}/all"])
        answer: list[Any] | dict[str, Any] | str = json.loads(self._store.get(f"{self._round}/all"))
        self._store.delete_key(f"{self._round}/{self._rank}")  # rank 0 has read it
        if isinstance(answer, str):
            raise DistributedOperationException(answer)
        return (
            answer if isinstance(answer, dict) else [value for value, count in answer for _ in range(count)]
        )

    def _uncount(self) -> None:
        """Undo the count of a collective that other ranks have not begun."""
        monitor = self._monitor()
        if self._in_main_thread and monitor is not None:
            monitor.count -= 1

    def _leave(self, operation: str) -> None:
        """Return on rank 0, whose process keeps the store, after all other ranks."""
        if self._rank == 0:
            self._wait(operation, [f"{self._round}/empty"], leaves=True)
        elif self._store.add(f"{self._round}/left", 1) == self.world_size - 1:
            self._store.set(f"{self._round}/empty", "")

    def _wait(
        self, operation: str, keys: list[str], *, may_be_alone: bool = False, leaves: bool = False
    ) -> None:
        """Wait for keys: on rank 0 those of all ranks, elsewhere the answer of rank 0.

        Raises:
            AbsentRankError: Rank 0 may be alone, and is.
            DistributedOperationException: A rank has ended or died.
            StalledCollectiveError: A collective has timed out on another rank.
        """
        monitor, in_main_thread = self._monitor(), self._in_main_thread and not leaves
        pause = timedelta(seconds=max(POLL_S, self.world_size / RANKS_PER_S))
        seen: dict[tuple[int, str], tuple[object, float]] = {}
        with hang_monitor.collective_scope(operation) if in_main_thread else nullcontext():
            while not self._store.check(keys):
                with suppress(RuntimeError):  # time is over; or the store is gone, as the next request says
                    self._store.wait(keys, pause)
                    return
                if monitor is None:
                    continue
                missing = range(1, self.world_size) if self._rank == 0 else [0]
                if self._rank == 0 and not leaves:
                    present = present_values(self._store, keys)
                    missing = [rank for rank, key in enumerate(keys) if key not in present]
                self._check(operation, monitor, missing, seen, may_be_alone, in_main_thread)

    def _check(
        self,
        operation: str,
        monitor: HangMonitor,
        missing: Sequence[int],
        seen: dict[tuple[int, str], tuple[object, float]],
        may_be_alone: bool,
        in_main_thread: bool,
    ) -> None:
        """Look for ranks that have ended or died in the last statuses of those that are missing."""
        now = time.monotonic()
        reasons = dict.fromkeys(missing, "")

        def lasted(rank: int, what: str, value: object) -> float:
            if seen.get((rank, what), (None,))[0] != value:
                seen[rank, what] = value, now
            return now - seen[rank, what][1]

        for rank, status in monitor.statuses(missing).items():
            if status is None:
                continue
            # Statuses may be late: it must be in another collective, which needs this rank, for a while.
            passed = status.collective >= monitor.count and (status.inside or monitor.asynchronous)
            stuck = lasted(rank, "location", (status.collective, status.location) if passed else "")
            silent = lasted(rank, "heartbeat", status.heartbeat)
            if in_main_thread and status.exited:
                reasons[rank] = _ENDED
            elif may_be_alone and passed and stuck >= (not self._was_alone) * STUCK_S:
                reasons[rank] = _ELSEWHERE
            elif silent >= SILENT_S:
                reasons[rank] = _DEAD
        if _ENDED in reasons.values():
            monitor.read_diagnosis()  # a rank that ends because a collective has failed says so before
        if in_main_thread and monitor.diagnosis is not None:
            raise StalledCollectiveError(f"{operation}: {monitor.diagnosis}")
        all_missing = may_be_alone and len(missing) == self.world_size - 1
        is_alone = all_missing and {*reasons.values()} <= {_ENDED, _ELSEWHERE}
        for rank, reason in reasons.items():
            if is_alone or reason == _DEAD or (reason == _ENDED and not all_missing):
                # Rank 0 shows the statuses of all ranks; the others, of which there may be thousands, two.
                shown = range(self.world_size) if self._rank == 0 else (0, self._rank)
                kind = AbsentRankError if is_alone else DistributedOperationException
                raise kind(
                    f"{operation} must be called on every rank, but rank {rank} {reason}: "
                    f"{format_statuses(monitor.statuses(shown))}."
                )


Agreement = SingleProcess | StoreAllGather
