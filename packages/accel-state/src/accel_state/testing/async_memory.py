"""Queues, clocks and storages of the late device, and the detector of races between them.

The method is that of `torch.cuda._sanitizer`, except that an access covers a range of bytes rather than a
pointer, so that views count, and that every host thread is an actor.

A thread is ordered after its own work and after the work of threads that synchronised with it: by a lock and
primitives built on locks (conditions, events, queues, futures), by starting or joining a thread, or by a task
of a pool. Work that a thread submits to a stream is ordered only after the stream's work known to the thread.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

if TYPE_CHECKING:
    from accel_state.testing.async_device import LateDevice


Clock = dict[int, int]
"""A vector clock: the number of accesses by actor."""


@dataclass(slots=True, eq=False)
class Actor:
    """A host thread, or the work that a host thread submits to a stream.

    Args:
        number: Its key in clocks.
        name: Its name in messages.
        stream: The stream; None for a host thread.
    """

    number: int
    name: str
    stream: LateStream | None = None
    clock: Clock = field(default_factory=dict[int, int])

    def join(self, clock: Clock) -> None:
        """Order all later accesses of the actor after those in `clock`."""
        for number, count in clock.items():
            if count > self.clock.get(number, 0):
                self.clock[number] = count


@dataclass(slots=True, eq=False)
class Access:
    """One read or write of a range of bytes.

    Args:
        actor: The actor that reads or writes.
        count: The actor's count of accesses, this one included.
        writes: Whether it writes.
        start: First byte in the storage.
        end: First byte after the range.
        what: The operator or copy.
        where: File and line of the code.
    """

    actor: Actor
    count: int
    writes: bool
    start: int
    end: int
    what: str
    where: str

    def is_in(self, clock: Clock) -> bool:
        """Return whether a clock has the access: an actor with this clock is ordered after it."""
        return self.count <= clock.get(self.actor.number, 0)

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return (
            f"{self.what} {verb} bytes {self.start} to {self.end} on {self.actor.name}\n    at {self.where}"
        )


@dataclass(frozen=True, slots=True)
class Race:
    """Two unordered accesses to one storage, at least one of them a write."""

    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.second}\n  is not ordered after\n  {self.first}"


class History:
    """The accesses to one storage that later ones may race with."""

    def __init__(self) -> None:
        self.accesses: list[Access] = []

    def conflicts(self, access: Access) -> list[Race]:
        """Return the races of an access that is about to be added."""
        return [
            Race(str(before), str(access))
            for before in self.accesses
            if (before.writes or access.writes)
            and before.start < access.end
            and access.start < before.end
            and not before.is_in(access.actor.clock)
        ]

    def add(self, access: Access) -> None:
        """Add an access and drop those that it makes redundant."""
        self.accesses = [
            before
            for before in self.accesses
            if not (
                access.start <= before.start
                and before.end <= access.end
                and (access.writes or (not before.writes and before.actor is access.actor))
            )
        ]
        self.accesses.append(access)


Knowledge = dict["LateStream | None", Clock]
"""The clock of the work submitted to each stream; for None, of the work that was waited for."""

_numbers = itertools.count(1)


class HostThread:
    """One host thread.

    Attributes:
        actor: The thread itself; its clock has the work that it has waited for.
        device: The index of its current device.
        streams: Its current stream of each device where it is not the default stream.
        inside: Whether it runs code of the late device.
    """

    def __init__(self, name: str) -> None:
        self.actor = Actor(next(_numbers), name)
        self.device = 0
        self.streams: dict[int, LateStream] = {}
        self.inside = False
        self._actors: dict[LateStream | None, Actor] = {None: self.actor}

    def at(self, stream: LateStream) -> Actor:
        """Return the actor for this thread's work on a stream, ordered after all the thread waited for."""
        actor = self._actors.get(stream)
        if actor is None:
            actor = self._actors[stream] = Actor(next(_numbers), stream.name, stream)
        actor.join(self.actor.clock)
        return actor

    def clock_of(self, stream: LateStream | None) -> Clock:
        """Return the clock of a stream's work known to the thread; for None, of the work it waited for."""
        actor = self._actors.get(stream)
        return {} if actor is None else dict(actor.clock)

    def knowledge(self) -> Knowledge:
        """Return the clocks known to the thread."""
        return {stream: dict(actor.clock) for stream, actor in self._actors.items()}

    def learn(self, knowledge: Knowledge) -> None:
        """Merge the clocks known to another thread."""
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
        """The calling thread."""
        known: HostThread | None = getattr(self._local, "thread", None)
        if known is None:
            # Not the thread's own name: a starting thread has none yet.
            name = f"host thread {len(self._all) + 1}" if self._all else "the host"
            known = self._local.thread = HostThread(name)
            self._all.append(known)
        return known

    def clock_of(self, stream: LateStream | None) -> Clock:
        """Return the clock of all work that any thread has submitted to a stream, or has waited for."""
        total = Actor(0, "")
        for thread in list(self._all):
            total.join(thread.clock_of(stream))
        return total.clock

    @contextmanager
    def watch(self) -> Generator[None]:
        """Track synchronisation of threads by primitives created within the block."""
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
    """A lock that passes the known clocks of threads that release it to the threads that acquire it."""

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
    """A re-entrant lock, with the methods that `threading.Condition` needs."""

    def _release_save(self) -> Any:
        self._share()
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)
        self._threads.thread.learn(self._known)


_SWEEP = 512
_FRAMES = 3
_OWN = (
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "streams.py"),
    str(Path(torch.__file__).parent),
    "<frozen",
)


POISON = 0xFF
"""The byte that freed and new memory is filled with: NaN in every floating-point format, -1 in integers."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory that is allocated to one storage after the other.

    Args:
        memory: uint8, of the block's capacity.
        owner: The stream to whose pool it belongs; None for pinned memory.
        history: The accesses to its current storage.
        recorded: The streams of `record_stream`.
        until: The conditions for its reuse.
        where: File and line that allocated its current storage.
    """

    memory: np.ndarray
    owner: LateStream | None
    history: History = field(default_factory=History)
    recorded: list[LateStream] = field(default_factory=list["LateStream"])
    until: list[Callable[[], bool]] = field(default_factory=list["Callable[[], bool]"])
    where: str = ""

    def poison(self) -> None:
        """Overwrite all of it."""
        self.memory.fill(POISON)

    def tensor(self) -> Tensor:
        """Return all of the memory, without keeping its current storage alive."""
        return torch.from_numpy(self.memory)


class Pool:
    """A memory pool: blocks by owner. The block that was freed last is reused first."""

    def __init__(self) -> None:
        self._freed: deque[Block] = deque()
        self._waiting: list[Block] = []
        self._free: list[Block] = []

    def take(self, nbytes: int, owner: LateStream | None) -> tuple[Block, Tensor]:
        """Allocate memory.

        Returns:
            The block, and a uint8 tensor of shape `(nbytes,)` with whose deletion the block is freed.
        """
        self._waiting, still = [], self._waiting
        for block in still:
            ready = all(condition() for condition in block.until)
            (self._free if ready else self._waiting).append(block)
        fitting = [block for block in self._free if block.owner is owner and block.memory.size >= nbytes]
        if fitting:
            block = fitting[-1]
            self._free.remove(block)
        else:
            block = Block(np.empty(max(nbytes, 1), dtype=np.uint8), owner)
        block.until = []
        block.recorded = []
        block.history = History()
        lease = block.memory[:]
        weakref.finalize(lease, self._freed.append, block).atexit = False
        return block, torch.from_numpy(lease)[:nbytes]

    def freed(self) -> list[Block]:
        """Return the blocks whose last tensor was deleted since the last call."""
        blocks: list[Block] = []
        while self._freed:
            blocks.append(self._freed.popleft())
        return blocks

    def free_block(self, block: Block) -> None:
        """Make a freed block available, at once or when its conditions hold."""
        (self._waiting if block.until else self._free).append(block)


class Kind(Enum):
    """The kind of memory of a storage. On the CPU only its use shows the kind."""

    UNKNOWN = 0
    DEVICE = 1
    PINNED = 2


@dataclass(slots=True)
class Tracked:
    """A tracked storage.

    Args:
        reference: Reserves the storage's address, so that no other storage gets it.
        nbytes: Its size.
        kind: The kind of its memory.
        device: Its device, if it is in device memory.
        block: Its block, if the late device has allocated it.
    """

    reference: StorageWeakRef
    nbytes: int
    kind: Kind = Kind.UNKNOWN
    device: LateDevice | None = None
    block: Block | None = None
    history: History = field(default_factory=History)


class Storages:
    """All storages that were seen, by identity."""

    def __init__(self) -> None:
        self._table: dict[int, Tracked] = {}
        self._limit = _SWEEP

    def find(self, tensor: Tensor) -> Tracked:
        """Return the record of a tensor's storage; start to track it if it is new."""
        key = storage_id(tensor)
        tracked = self._table.get(key)
        if tracked is None:
            if len(self._table) > self._limit:
                self._table = {
                    known: row for known, row in self._table.items() if not row.reference.expired()
                }
                self._limit = 2 * len(self._table) + _SWEEP
            tracked = self._table[key] = Tracked(
                StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
            )
        return tracked

    def kind(self, tensor: Tensor) -> Kind:
        """Return the kind of a tensor's memory."""
        return self.find(tensor).kind

    def nbytes(self, kind: Kind, device: LateDevice | None = None) -> int:
        """Return the bytes of the living storages of a kind, on a device."""
        return sum(
            tracked.nbytes
            for tracked in self._table.values()
            if tracked.kind is kind and tracked.device is device and not tracked.reference.expired()
        )


def storage_id(tensor: Tensor) -> int:
    """Return an identifier of a tensor's storage, valid as long as a (weak) reference to it is held."""
    return tensor.untyped_storage()._cdata


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage and the first after it.

    Example:
        >>> byte_range(torch.zeros(4, 4)[1:3, :2])
        (16, 40)
    """
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def user_line() -> str:
    """Return the innermost lines of the caller's code that are neither torch's nor this package's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN):
            lines.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n    called at ".join(lines) or "an unknown place"


Schedule = Literal["late", "early"]
"""When copies run: at the last moment that waits permit, or as soon as they are issued."""


class LateStream:
    """A queue of copies that run when they are waited for."""

    def __init__(self, device: LateDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.submitted = 0
        self.done = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._context: AbstractContextManager[None] | None = None

    def __enter__(self) -> LateStream:
        """Keep the context in the stream, as torch's streams did before torch 2.11.

        Raises:
            RuntimeError: The stream is entered already, by any thread.
        """
        if self._context is not None:
            raise RuntimeError(f"the context of {self.name} is entered already: use `on` of its device")
        self._context = self.device.on(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Leave the context."""
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(*error)

    def submit(self, work: Callable[[], None]) -> None:
        """Queue work."""
        self._queue.append(work)
        self.submitted += 1
        if self.device.schedule == "early":
            self.run()

    def run(self, until: int | None = None) -> None:
        """Run the first `until` items of work ever submitted to the stream, or all of them."""
        until = self.submitted if until is None else until
        while self.done < until:
            self._queue.popleft()()
            self.done += 1

    def reaches_end(self) -> Callable[[], bool]:
        """Return a function that returns whether all of the stream's current work is done."""
        position = self.submitted
        return lambda: self.done >= position

    def wait_event(self, event: Any) -> None:
        """Order later work after an event."""
        with self.device.own_code():
            actor = self.device.host.thread.at(self)
            if event.point is not None:
                stream, position, clock = event.point
                actor.join(clock)
                self.submit(lambda: stream.run(position))

    def wait_stream(self, stream: Any) -> None:
        """Order later work after all current work of a stream."""
        event = LateEvent(self.device)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Run all work of the stream."""
        event = LateEvent(self.device)
        event.record(self)
        event.synchronize()


class LateEvent:
    """A position in a stream's queue, with the clock of the stream known to the recording thread."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.point: tuple[LateStream, int, Clock] | None = None

    def record(self, stream: Any) -> None:
        """Record the current end of the stream's queue."""
        with self._device.own_code():
            self.point = (stream, stream.submitted, dict(self._device.host.thread.at(stream).clock))

    def synchronize(self) -> None:
        """Run the stream's queue up to the event."""
        with self._device.own_code():
            if self.point is not None:
                stream, position, clock = self.point
                stream.run(position)
                self._device.host.thread.actor.join(clock)

    def query(self) -> bool:
        """Return False until the event has been waited for, but complete its work before the next query."""
        with self._device.own_code():
            if self.point is None:
                return True
            stream, position, clock = self.point
            if stream.done >= position:
                self._device.host.thread.actor.join(clock)
                return True
            stream.run(position)
            return False


@dataclass(slots=True, eq=False)
class Copy:
    """A copy between pinned and device memory.

    Args:
        target: The target, as a view that does not keep the device's memory alive.
        source: The source, likewise.
        where: File and line of the code.
        expected: The source's values when the copy was issued, if they must not change.
    """

    target: Tensor
    source: Tensor
    where: str
    expected: Tensor | None = None

    def overlaps(self, other: Copy) -> bool:
        """Return whether a copy that runs earlier may change the operands of this copy."""
        own = [_addresses(self.target), _addresses(self.source)]
        return any(
            a[0] < b[1] and b[0] < a[1]
            for a in own
            for b in (_addresses(other.target), _addresses(other.source))
        )

    def poison_target(self) -> None:
        """Overwrite the target's old values, which the copy will replace anyway."""
        if self.target.dtype is not torch.bool:
            floating = self.target.is_floating_point() or self.target.is_complex()
            with torch.no_grad():
                self.target.fill_(math.nan if floating else _LOWEST.get(self.target.dtype, -1))

    def run(self) -> list[Race]:
        """Copy the bytes; return a race if the source was changed meanwhile."""
        races: list[Race] = []
        if self.expected is not None:
            before, now = (part.reshape(-1).view(torch.uint8) for part in (self.expected, self.source))
            if not torch.equal(before, now):
                change = "a change of the memory that a copy reads, by the host or by a stream"
                races.append(Race(f"a copy\n    at {self.where}", change))
        with torch.no_grad():
            self.target.copy_(self.source)
        return races


_LOWEST = {torch.uint8: 255, torch.uint16: 65535, torch.uint32: 2**32 - 1}


def _addresses(tensor: Tensor) -> tuple[int, int]:
    start, end = byte_range(tensor)
    base = tensor.untyped_storage().data_ptr()
    return base + start, base + end
