"""Host threads: what each knows of the device's work, and what one of them learns from another.

A thread knows what it has done itself, and what a thread had done that handed something over to it: by a
lock, and what is built on locks (conditions, events, queues, futures), by starting or joining a thread, or by
a task of a pool. What a thread gives to a stream is ordered only after what it knows the stream to have.
"""

from __future__ import annotations

import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock
from weakref import WeakKeyDictionary

from accel_state.testing.clocks import Actor, Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from accel_state.testing.queues import LateStream

Knowledge = dict["LateStream | None", Clock]
"""By stream, what it was given before; for None, what was waited for."""

_numbers = itertools.count(1)


class HostThread:
    """One host thread.

    Attributes:
        actor: The thread itself; its clock has what it has waited for.
        device: The index of its current device.
        streams: Its current stream of each device where it is not the default stream.
        inside: Whether it is in the late device's own code.
    """

    def __init__(self, name: str) -> None:
        self.actor = Actor(next(_numbers), name)
        self.device = 0
        self.streams: dict[int, LateStream] = {}
        self.inside = False
        self._actors: dict[LateStream | None, Actor] = {None: self.actor}

    def at(self, stream: LateStream) -> Actor:
        """Return what gives a stream this thread's work: later than all that the thread has waited for."""
        actor = self._actors.get(stream)
        if actor is None:
            actor = self._actors[stream] = Actor(next(_numbers), stream.name, stream)
        actor.join(self.actor.clock)
        return actor

    def clock_of(self, stream: LateStream | None) -> Clock:
        """Return what the thread knows a stream to have; or, for None, what it has waited for."""
        actor = self._actors.get(stream)
        return {} if actor is None else dict(actor.clock)

    def knowledge(self) -> Knowledge:
        """Return what the thread knows."""
        return {stream: dict(actor.clock) for stream, actor in self._actors.items()}

    def learn(self, knowledge: Knowledge) -> None:
        """Add what another thread knew."""
        for stream, clock in knowledge.items():
            (self.actor if stream is None else self.at(stream)).join(clock)


class HostThreads:
    """The host threads of one late device."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._all: list[HostThread] = []
        self._ended: WeakKeyDictionary[threading.Thread, Knowledge] = WeakKeyDictionary()

    @property
    def thread(self) -> HostThread:
        """The thread that asks."""
        known: HostThread | None = getattr(self._local, "thread", None)
        if known is None:
            # Not the thread's own name: one that starts has none yet.
            name = f"host thread {len(self._all) + 1}" if self._all else "the host"
            known = self._local.thread = HostThread(name)
            self._all.append(known)
        return known

    def clock_of(self, stream: LateStream | None) -> Clock:
        """Return all that any thread has given to a stream, or has waited for."""
        total = Actor(0, "")
        for thread in list(self._all):
            total.join(thread.clock_of(stream))
        return total.clock

    @contextmanager
    def watch(self) -> Generator[None]:
        """See what threads hand over, by means that are made within the block."""
        start, join, submit = threading.Thread.start, threading.Thread.join, ThreadPoolExecutor.submit
        lock, rlock = threading.Lock, threading.RLock

        def started(thread: threading.Thread) -> None:
            thread.run = self._after(self.thread.knowledge(), thread.run, thread)  # type: ignore[method-assign]
            start(thread)

        def joined(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive():
                self.thread.learn(self._ended.get(thread, {}))

        def submitted(
            pool: ThreadPoolExecutor, task: Callable[..., Any], /, *args: Any, **kwargs: Any
        ) -> Any:
            return submit(pool, self._after(self.thread.knowledge(), task), *args, **kwargs)

        with ExitStack() as patches:
            for owner, name, seen in (
                (threading.Thread, "start", started),
                (threading.Thread, "join", joined),
                (ThreadPoolExecutor, "submit", submitted),
                (threading, "Lock", lambda: _SeenLock(self, lock())),
                (threading, "RLock", lambda: _SeenRLock(self, rlock())),
            ):
                patches.enter_context(mock.patch.object(owner, name, seen))
            yield

    def _after(
        self, knowledge: Knowledge, task: Callable[..., Any], thread: threading.Thread | None = None
    ) -> Callable[..., Any]:
        @functools.wraps(task)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.thread.learn(knowledge)
            try:
                return task(*args, **kwargs)
            finally:
                if thread is not None:
                    self._ended[thread] = self.thread.knowledge()

        return run


class _SeenLock:
    """A lock: who acquires it knows what those knew who released it."""

    def __init__(self, threads: HostThreads, lock: Any) -> None:
        self._threads = threads
        self._lock = lock
        self._known: Knowledge = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        acquired = self._lock.acquire(*args, **kwargs)
        if acquired:
            self._threads.thread.learn(self._known)
        return acquired

    def release(self) -> None:
        self._share()
        self._lock.release()

    def _share(self) -> None:
        for stream, clock in self._threads.thread.knowledge().items():
            known = self._known.setdefault(stream, {})
            known |= {number: max(count, known.get(number, 0)) for number, count in clock.items()}


class _SeenRLock(_SeenLock):
    """A lock that its owner may acquire again; with what `threading.Condition` asks of one."""

    def _release_save(self) -> Any:
        self._share()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._threads.thread.learn(self._known)
