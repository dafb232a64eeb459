"""How ranks agree about a checkpoint: short texts through the store of the process group, from any thread.

Not through collectives: those belong to the main thread, end in the process group's timeout, and say nothing
about a rank that never came.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel_state import hang_monitor
from accel_state.backends.torch_dist import default_store
from accel_state.errors import DistributedOperationException
from accel_state.rank_status import format_statuses

if TYPE_CHECKING:
    from accel_state.rank_status import RankStatus
    from accel_state.runtime import Runtime

logger = logging.getLogger(__name__)

_STUCK = 3.0  # seconds that a rank must have been in another collective to be sure that it will not come
_SILENT = 60.0  # seconds without a sign of life after which a rank is taken to be dead
_PATIENCE = 30.0  # seconds after which a wait is worth a warning
_LONGEST_PAUSE = 0.05  # seconds between two looks into the store
_LOOK = 0.5  # seconds between two looks at where the others are


class Agreement(Protocol):
    """A way for all ranks to tell each other short texts."""

    def exchange(self, what: str, text: str, *, last: bool = False) -> list[str]:
        """Tell the others a text, and get those of all ranks, in rank order.

        Args:
            what: What all ranks are doing, for the messages.
            text: What this rank says.
            last: Whether nothing is exchanged afterwards, so that the process that keeps the store may end.

        Raises:
            DistributedOperationException: Another rank is elsewhere and will not come, or is gone.
        """
        ...


class Alone:
    """The agreement of a process that is alone."""

    def exchange(self, what: str, text: str, *, last: bool = False) -> list[str]:
        """The text alone."""
        del what, last
        return [text]


class StoreAgreement:
    """The agreement of several processes. Each thread that agrees needs one of its own.

    Args:
        store: A connection to the store of the process group that no other thread waits on.
        rank: Index of this process.
        world_size: Number of processes.
        channel: Tells apart what different threads agree on.
        in_main_thread: Whether the main thread of every rank takes part, so that a rank whose main thread
            waits for something else will not come.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, channel: str, in_main_thread: bool) -> None:
        self._in_main_thread = in_main_thread
        self._store = PrefixStore(f"accel/checkpoint/{channel}", store)
        self._rank = rank
        self._world_size = world_size
        # Counted in the store: makers of several accelerators in a process count on.
        self._round = self._store.add(f"rounds/{rank}", 0)

    def exchange(self, what: str, text: str, *, last: bool = False) -> list[str]:
        """Tell the others a text, and get those of all ranks, in rank order; see `Agreement`."""
        self._round = self._store.add(f"rounds/{self._rank}", 1)
        here = f"{self._round}"
        try:
            self._store.set(f"{here}/{self._rank}", text)
            texts = self._collect(what, here) if self._rank == 0 else self._receive(what, here)
            if last:
                self._part(what, here)
        except DistributedOperationException:
            raise
        except RuntimeError as error:  # the errors of a store have no type of their own in older torch
            raise DistributedOperationException(
                f"{what}: the store of the process group cannot be reached; rank 0, which keeps it, has "
                f"ended or failed ({str(error).splitlines()[0]})."
            ) from error
        return texts

    def _collect(self, what: str, here: str) -> list[str]:
        """On rank 0: get the texts of all, and hand them out."""
        keys = [f"{here}/{rank}" for rank in range(self._world_size)]
        try:
            self._wait(what, keys)
        except DistributedOperationException as error:
            if any(self._store.check([key]) for key in keys[1:]):
                self._store.set(f"{here}/all", json.dumps(str(error)))  # also to those who come too late
            else:
                self._take_back(here)
            raise
        texts = [self._store.get(key).decode() for key in keys]
        self._store.set(f"{here}/all", json.dumps(texts))
        for part in (*range(self._world_size), "all", "left"):  # everyone is through with the round before
            self._store.delete_key(f"{self._round - 1}/{part}")
        return texts

    def _receive(self, what: str, here: str) -> list[str]:
        try:
            self._wait(what, [f"{here}/all"], absent=[0])
        except DistributedOperationException:
            self._take_back(here)
            raise
        texts: list[str] | str = json.loads(self._store.get(f"{here}/all"))
        if isinstance(texts, str):
            raise DistributedOperationException(texts)
        return texts

    def _take_back(self, here: str) -> None:
        """Undo a call that nobody has answered, so that ranks count alike if they go on after the error."""
        self._store.delete_key(f"{here}/{self._rank}")
        self._store.add(f"rounds/{self._rank}", -1)

    def _part(self, what: str, here: str) -> None:
        """Let the process that keeps the store be the last to go."""
        if self._rank:
            self._store.add(f"{here}/left", 1)
            return
        self._store.add(f"{here}/left", 0)
        lookout = Lookout(what, judges_places=False)
        pause = 0.001
        while self._store.add(f"{here}/left", 0) < self._world_size - 1:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
            lookout.look(list(range(1, self._world_size)))

    def _wait(self, what: str, keys: list[str], absent: list[int] | None = None) -> None:
        lookout = Lookout(what, judges_places=self._in_main_thread)
        pause = 0.001
        with hang_monitor.collective_scope(what) if self._in_main_thread else nullcontext():
            while not self._store.check(keys):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
                if lookout.is_due():
                    missing = absent or [
                        rank for rank, key in enumerate(keys) if not self._store.check([key])
                    ]
                    lookout.look(missing)


class Lookout:
    """Finds out whether ranks that have not come will ever come.

    Args:
        what: What the others are doing, for the messages.
        judges_places: Whether a rank that is in another collective, or has ended, cannot come any more.
    """

    def __init__(self, what: str, *, judges_places: bool) -> None:
        self._what = what
        self._judges_places = judges_places
        self._began = self._looked = time.monotonic()
        self._warned = False
        self._seen: dict[int, tuple[Any, float, int, float]] = {}

    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self._looked >= _LOOK

    def look(self, missing: list[int]) -> None:
        """Judge by what the missing ranks last said about themselves.

        Raises:
            DistributedOperationException: One of them waits in another collective, has left, or is silent.
        """
        if not self.is_due():
            return
        now = self._looked = time.monotonic()
        snapshot = hang_monitor.snapshot()
        if snapshot is None:
            return
        for rank in missing:
            note = snapshot.all_statuses[rank]
            reason = None if note is None else self._judge(note, snapshot.collective, now)
            if reason is not None:
                raise DistributedOperationException(
                    f"{self._what} must be called on every rank, but rank {rank} {reason}: "
                    f"{format_statuses(snapshot.all_statuses)}."
                )
        if now - self._began >= _PATIENCE and not self._warned:
            self._warned = True
            logger.warning(
                "%s waits for %s: %s.", self._what, _ranks(missing), format_statuses(snapshot.all_statuses)
            )

    def _judge(self, note: RankStatus, collective: int, now: float) -> str | None:
        """Why a rank will not come, if that is certain."""
        # In another collective, which needs this rank; for some time, since notes may be a second old.
        place = (note.collective, note.location) if note.inside and note.collective >= collective else None
        old_place, since, tick, heard = self._seen.get(note.rank, (None, now, -1, now))
        since = since if place is not None and place == old_place else now
        heard = heard if note.heartbeat == tick else now
        self._seen[note.rank] = (place, since, note.heartbeat, heard)
        if self._judges_places and note.exited:
            return "has ended"
        if self._judges_places and now - since >= _STUCK:
            return "waits elsewhere"
        return "gives no sign of life" if now - heard >= _SILENT else None


def agreement_of(runtime: Runtime, channel: str, *, in_main_thread: bool) -> Agreement:
    """The agreement of the processes of a run.

    Args:
        runtime: Of this process.
        channel: Tells apart what different threads agree on.
        in_main_thread: Whether the main thread of every rank takes part.
    """
    topology = runtime.topology
    if topology.world_size == 1:
        return Alone()
    return StoreAgreement(
        hang_monitor.clone_store(default_store()),
        rank=topology.rank,
        world_size=topology.world_size,
        channel=channel,
        in_main_thread=in_main_thread,
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
