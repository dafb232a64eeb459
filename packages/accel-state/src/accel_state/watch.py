"""The hang explainer: when ranks wait for each other in vain, the error says where every one of them is.

Every collective runs inside a `region`, which notes the user's line in about a microsecond. A thread on the
side posts that note, or where the main thread is otherwise, to the store of the process group about once a
second. When the backend gives up on a collective, the notes of all ranks make the message.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
import time
from collections import deque
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented

from accel_state.errors import StalledCollectiveError
from accel_state.whereabouts import Whereabouts, call_site, explain, main_thread_site, place_of

if TYPE_CHECKING:
    from types import CodeType, TracebackType

    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage] - documented

_RING = 16  # collectives of this rank that are remembered
_PATIENCE = 60.0  # seconds after which a wait is worth a warning
_BACKEND_WORDS = (
    "gloo/",
    "gloo::",
    "NCCL",
    "ProcessGroup",
    "Connection closed",
    "Connection reset",
    "timed out",
    "Timed out",
)

logger = logging.getLogger(__name__)

_Slot = tuple[int, str, "tuple[CodeType, int] | None"]
_active: Watch | None = None


class region:  # noqa: N801 - used like a function, in `with`
    """Mark what happens inside as one collective operation of this rank.

    Costs nothing in a single process, and about a microsecond otherwise. Regions inside regions count as
    part of the outermost.

    Args:
        operation: What is done, for a place without source text, such as `"backward"`.

    Raises:
        StalledCollectiveError: On entry if another rank has given up waiting; on leaving in place of the
            backend's error when this rank has.

    Example:
        >>> with region("all_reduce"):
        ...     pass
    """

    __slots__ = ("_mine", "_operation")

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._mine: Watch | None = None

    def __enter__(self) -> None:
        watch = _active
        if watch is None or watch.slot is not None:
            return
        if watch.verdict is not None:
            raise StalledCollectiveError(watch.verdict)
        self._mine = watch
        watch.count = number = watch.count + 1
        watch.slot = slot = (number, self._operation, call_site(sys._getframe(1)))  # pyright: ignore[reportPrivateUsage] - public in all but name
        watch.ring.append(slot)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch = self._mine
        if watch is None:
            return
        try:
            if isinstance(error, RuntimeError) and _is_of_backend(error):
                raise StalledCollectiveError(watch.give_up(self._operation, error)) from error
        finally:
            watch.slot = None


class Watch:
    """The notes of this rank, and the thread that posts them.

    Args:
        store: A connection to the job's store that nobody else uses.
        rank: Index of this process.
        world_size: Number of processes.
        limit: Seconds after which the backend gives up on a collective.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, limit: float) -> None:
        self.slot: _Slot | None = None
        self.count = 0
        self.verdict: str | None = None
        self.ring: deque[_Slot] = deque(maxlen=_RING)
        self._store = PrefixStore("accel/watch", store)
        self._rank = rank
        self._world_size = world_size
        self._tick = 0
        self._limit = limit
        # About once a second, less often where a thousand ranks share one store, more often for short limits.
        self.interval = min(max(1.0, world_size / 200), max(0.05, limit / 5))
        self._warn_after = min(_PATIENCE, limit / 2)
        self._stalled: tuple[_Slot, float] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accel-watch", daemon=True)

    def start(self) -> None:
        """Begin to post."""
        self._thread.start()

    def stop(self) -> None:
        """Say good-bye and end the thread."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)

    def give_up(self, operation: str, error: RuntimeError) -> str:
        """Make the message for a collective that the backend has given up, and tell it to the other ranks."""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        try:
            verdict = f"`{operation}` did not complete: {self._explanation()}."
            # The first rank to give up is quoted by all, so that all tell the same story.
            agreed = self._store.compare_set("verdict", "", verdict).decode() or verdict
        except RuntimeError:
            where, source = place_of(self.slot[2] if self.slot else None)
            agreed = (
                f"`{operation}` did not complete, and the store that knows where the others are is gone, "
                f"probably with rank 0; rank {self._rank} is at {where} `{source}`."
            )
        self.verdict = agreed
        return f"{agreed} Rank {self._rank} heard from its backend: {reason}"

    def _explanation(self) -> str:
        """Where everyone is; takes a few intervals, to find out who no longer answers."""
        self._post()
        before = self._everyone()
        time.sleep(2.5 * self.interval)
        now = self._everyone()
        silent = [
            rank
            for rank, (old, new) in enumerate(zip(before, now, strict=True))
            if new is not None and old is not None and new.tick == old.tick and not new.left
        ]
        return explain(now, silent=silent)

    def _run(self) -> None:
        try:
            while not self._closing.wait(self.interval):
                self._post()
                self._listen()
                self._warn()
            self._post(left=True)
        except RuntimeError as error:  # the store is gone, with the process that kept it
            logger.debug("the hang explainer stops: %s", error)

    def _post(self, *, left: bool = False) -> None:
        slot = self.slot
        where, source = place_of(slot[2] if slot is not None else main_thread_site())
        self._tick += 1
        note = Whereabouts(
            rank=self._rank,
            tick=self._tick,
            where=where,
            source=source,
            collective=self.count,
            inside=slot is not None,
            left=left,
        )
        self._store.set(f"{self._rank}", note.to_text())

    def _listen(self) -> None:
        if self.verdict is None and self._store.check(["verdict"]):
            self.verdict = self._store.get("verdict").decode()
            logger.error("Another rank gave up waiting: %s", self.verdict)

    def _warn(self) -> None:
        slot, now = self.slot, time.monotonic()
        if slot is None or self._stalled is None or self._stalled[0] is not slot:
            self._stalled = None if slot is None else (slot, now)
            self._warn_after = min(_PATIENCE, self._limit / 2)
            return
        waited = now - self._stalled[1]
        if waited < self._warn_after:
            return
        self._warn_after = 2 * waited
        everyone = self._everyone()
        waiting = [place.rank for place in everyone if place is not None and place.inside]
        if waiting and waiting[0] == self._rank:
            logger.warning(
                "Waiting for %.0f s in `%s` (limit %.0f s): %s.",
                waited,
                slot[1],
                self._limit,
                explain(everyone),
            )

    def _everyone(self) -> list[Whereabouts | None]:
        keys = [f"{rank}" for rank in range(self._world_size)]
        return [
            Whereabouts.from_text(self._store.get(key)) if self._store.check([key]) else None for key in keys
        ]


def begin(store: Any, *, rank: int, world_size: int, limit: timedelta) -> None:
    """Start to watch this process, if it is one of several.

    Args:
        store: The default store of the process group; a connection of its own is made to it.
        rank: Index of this process.
        world_size: Number of processes.
        limit: After how long the backend gives up on a collective.
    """
    global _active  # noqa: PLW0603 - one process has one watch, and `region` must find it in no time
    end()
    if world_size > 1:
        watch = Watch(_own_connection(store), rank=rank, world_size=world_size, limit=limit.total_seconds())
        watch.start()
        _active = watch


def end() -> None:
    """Stop to watch; harmless when nothing is watched."""
    global _active
    watch, _active = _active, None
    if watch is not None:
        watch.stop()


def _own_connection(store: Any) -> Any:
    """A second connection to the same store: the first is blocked while a collective waits on it."""
    if hasattr(store, "clone"):
        return store.clone()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return TCPStore(store.host, store.port, None, False, timedelta(seconds=30))  # noqa: FBT003 - no keywords there
    return store


def _is_of_backend(error: RuntimeError) -> bool:
    """Whether the transport failed, rather than an argument or the user's model."""
    if type(error).__name__ in {"DistBackendError", "DistNetworkError"}:
        return True
    text = str(error)
    return any(word in text for word in _BACKEND_WORDS)


atexit.register(end)
