"""An asynchronous device, made of CPU memory, that behaves as badly as the rules of streams allow."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from accel_state.streams import override_streams
from accel_state.testing.clocks import Access, Actor, Race
from accel_state.testing.operators import OperatorMode, TransferMode
from accel_state.testing.queues import Copy, LateEvent, LateStream, Schedule
from accel_state.testing.storages import Kind, Pool, Storages, byte_range, user_line

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from torch import Tensor

    from accel_state.testing.storages import Block


class RaceError(AssertionError):
    """Accesses to device or pinned memory that no event orders.

    Args:
        races: All of them.
    """

    def __init__(self, races: Sequence[Race]) -> None:
        super().__init__(f"unordered accesses ({len(races)}):\n" + "\n".join(str(race) for race in races))
        self.races = tuple(races)


class LateDevice:
    """The streams of a device that is as late as it may be. Use `late_device` to get one.

    Args:
        schedule: When copies run.
    """

    def __init__(self, schedule: Schedule = "late") -> None:
        self.device = torch.device("cpu")
        self.schedule: Schedule = schedule
        self.lock = threading.RLock()
        self.races: list[Race] = []
        self.host = Actor(0, "the host")
        self._streams: list[LateStream] = []
        self._default = self.new_stream()
        self._thread = threading.local()
        self._storages = Storages()
        self._pool = Pool()
        self._pending: list[Copy] = []

    @property
    def pending(self) -> int:
        """How many copies were issued and have not run."""
        return len(self._pending)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the device's own code."""
        return getattr(self._thread, "inside", False)

    def new_stream(self) -> LateStream:
        """Create a stream."""
        number = len(self._streams) + 1
        self._streams.append(
            LateStream(self, number, "the default stream" if number == 1 else f"stream {number}")
        )
        return self._streams[-1]

    def current_stream(self) -> LateStream:
        """Return the stream to which this thread's operators go."""
        return getattr(self._thread, "stream", self._default)

    @contextmanager
    def on(self, stream: Any) -> Generator[None]:
        """Send this thread's operators to a stream within the block."""
        before = self.current_stream()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def new_event(self) -> LateEvent:
        """Create an event."""
        return LateEvent(self)

    def empty(self, nbytes: int) -> Tensor:
        """Hand out poisoned memory, if possible that which the current stream freed last."""
        with self.own_code():
            stream = self.current_stream()
            tensor, block = self._allocate(nbytes, Kind.DEVICE, stream.actor)
            self._access(self._begin(stream), tensor, "the allocation", block.where, writes=True)
            stream.submit(block.poison)
            return tensor

    def pinned(self, nbytes: int) -> Tensor:
        """Hand out a poisoned host buffer."""
        with self.own_code():
            tensor, block = self._allocate(nbytes, Kind.PINNED, self.host)
            block.poison()
            return tensor

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream.

        Raises:
            ValueError: Not exactly one of the two is pinned memory.
        """
        with self.own_code():
            kinds = [self._storages.kind(tensor) for tensor in (target, source)]
            if kinds.count(Kind.PINNED) != 1:
                raise ValueError(
                    f"a copy from {kinds[1].name.lower()} to {kinds[0].name.lower()} memory at "
                    f"{user_line()} is not between pinned host memory, made by `pinned`, and the device: "
                    f"a real device would copy it while the host waits"
                )
            self._copy(target, source)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep a freed tensor's memory until the work is done that `stream` has by then."""
        with self.own_code():
            block = self._storages.find(tensor).block
            if block is not None:
                block.recorded.append(stream)

    def synchronize(self) -> None:
        """Run everything that all streams have."""
        for stream in list(self._streams):
            stream.synchronize()

    @contextmanager
    def watch(self) -> Generator[None]:
        """See this thread's operators within the block.

        `late_device` does this for the thread that enters it. What other threads do through the seam is
        always seen, and so is a change of memory that a pending copy reads; their operators only in such a
        block.
        """
        with OperatorMode(self), TransferMode(self):
            yield

    def check(self) -> None:
        """Raise what was found so far.

        Raises:
            RaceError: Accesses were not ordered.
        """
        with self.own_code():
            if self.races:
                raise RaceError(self.races)

    def is_pinned(self, tensor: Tensor) -> bool:
        """What `tensor.is_pinned()` says."""
        return tensor.layout is torch.strided and self._storages.kind(tensor) is Kind.PINNED

    def pin(self, tensor: Tensor) -> Tensor:
        """Do what `tensor.pin_memory()` does."""
        if self.is_pinned(tensor):
            return tensor
        return _like(self.pinned(tensor.numel() * tensor.itemsize), tensor).copy_(tensor)

    def upload(self, tensor: Tensor, *, blocking: bool) -> Tensor:
        """Do what `tensor.to(device)` does with pinned memory."""
        target = _like(self.empty(tensor.numel() * tensor.itemsize), tensor)
        self.plain_copy(target, tensor, blocking=blocking)
        return target

    def is_device_copy(self, target: Tensor, source: Tensor) -> bool:
        """Whether a plain `target.copy_(source)` is a copy between pinned memory and known device memory."""
        if source.layout is not torch.strided or target.layout is not torch.strided:
            return False
        kinds = {self._storages.kind(tensor) for tensor in (target, source)}
        return kinds == {Kind.PINNED, Kind.DEVICE}

    def plain_copy(self, target: Tensor, source: Tensor, *, blocking: bool) -> None:
        """Do what `target.copy_(source)` does between pinned and device memory."""
        with self.own_code():
            self._copy(target, source)
        if blocking:
            self.current_stream().synchronize()

    def before_operator(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Actor | None:
        """Register an operator's accesses.

        Returns:
            The stream's actor for an operator on device memory, the host's for one on pinned memory alone;
            None for one whose tensors could be in either.
        """
        with self.own_code():
            touched = [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]
            kinds = {self._storages.kind(tensor) for tensor, _ in touched}
            stream = self.current_stream()
            if Kind.DEVICE in kinds:
                stream.run()
            on_host = Kind.PINNED in kinds and Kind.DEVICE not in kinds
            actor = self._begin(None if on_host else stream)
            where = user_line()
            for tensor, is_write in touched:
                self._access(actor, tensor, name, where, writes=is_write)
            return actor if kinds - {Kind.UNKNOWN} else None

    def after_operator(
        self, name: str, outputs: Iterable[Tensor], actor: Actor | None, *, waits: bool
    ) -> None:
        """Register an operator's results; they are where its inputs are, and `waits` if the host has them."""
        with self.own_code():
            stream = self.current_stream()
            if actor is self.host:
                return
            where = user_line()
            for tensor in outputs:
                if actor is not None:
                    self._storages.find(tensor).kind = Kind.DEVICE
                self._access(stream.actor, tensor, name, where, writes=True)
            if actor is not None and waits:
                stream.synchronize()

    @contextmanager
    def own_code(self) -> Generator[None]:
        """Hold the lock, hide operators from `watch`, and notice what was freed."""
        with self.lock:
            before = self.is_inside
            self._thread.inside = True
            try:
                if not before:
                    for block in self._pool.freed():
                        self._free(block)
                yield
            finally:
                self._thread.inside = before

    def _begin(self, stream: LateStream | None) -> Actor:
        """Count one more piece of work of a stream, issued by the host; or of the host itself."""
        actor = self.host if stream is None else stream.actor
        actor.join(self.host.clock)
        actor.clock[actor.number] = actor.clock.get(actor.number, 0) + 1
        return actor

    def _access(self, actor: Actor, tensor: Tensor, what: str, where: str, *, writes: bool) -> None:
        tracked = self._storages.find(tensor)
        start, end = byte_range(tensor)
        if start == end or (actor is self.host and tracked.kind is Kind.UNKNOWN):
            return
        access = Access(actor, actor.clock.get(actor.number, 0), writes, start, end, what, where)
        if tracked.kind is not Kind.UNKNOWN:
            self.races += tracked.history.conflicts(access)
        tracked.history.add(access)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        stream = self.current_stream()
        where = user_line()
        actor = self._begin(stream)
        for tensor, writes in ((source, False), (target, True)):
            tracked = self._storages.find(tensor)
            if tracked.kind is Kind.UNKNOWN:
                tracked.kind = Kind.DEVICE
            self._access(actor, tensor, "a copy", where, writes=writes)
        copy = Copy(self._alias(target), self._alias(source), where)
        if not any(other.overlaps(copy) for other in self._pending):
            copy.expected = copy.source.clone()
            if self._storages.kind(target) is Kind.PINNED:
                copy.poison_target()
        self._pending.append(copy)

        def run() -> None:
            self._pending.remove(copy)
            self.races += copy.run()

        stream.submit(run)

    def _alias(self, tensor: Tensor) -> Tensor:
        """See a tensor's memory without keeping it from being freed, if it is the device's own."""
        block = self._storages.find(tensor).block
        storage = (tensor if block is None else block.tensor()).untyped_storage()
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _allocate(self, nbytes: int, kind: Kind, owner: Actor) -> tuple[Tensor, Block]:
        block, tensor = self._pool.take(nbytes, owner)
        block.where = user_line()
        tracked = self._storages.find(tensor)
        tracked.kind, tracked.block, tracked.history = kind, block, block.history
        return tensor, block

    def _free(self, block: Block) -> None:
        """Give a block back to its pool; find the streams that may still use it."""
        users = {access.actor.number: access for access in block.history.unseen_by(block.owner)}
        users.pop(block.owner.number, None)
        streams = [stream for stream in self._streams if stream.actor.number in users]
        if block.owner is not self.host:
            freed = (
                f"the end of the last use of memory of {block.owner.name}, without record_stream\n"
                f"    allocated at {block.where}"
            )
            self.races += [
                Race(str(users[stream.actor.number]), freed)
                for stream in streams
                if stream not in block.recorded
            ]
            streams = block.recorded
        block.until = [stream.reaches_end() for stream in streams]
        if not block.until and block.owner is not self.host:
            self._streams[block.owner.number - 1].submit(block.poison)
        self._pool.free_block(block)

    def finish(self) -> None:
        """Run what is pending, and `check`."""
        for stream in self._streams:
            with self.own_code():
                stream.run()
        self.check()


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """See bytes as a tensor of the shape, dtype and, if they leave no gaps, the strides of another one."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return flat.view(tensor.dtype).as_strided(tensor.size(), strides)


@contextmanager
def late_device(schedule: Schedule = "late") -> Generator[LateDevice]:
    """Make the CPU an asynchronous device that behaves as badly as the rules of streams allow.

    Within the block `device_streams(torch.device("cpu"))` is this device, and this thread's operators are
    watched. Memory is the device's if it comes from `empty`, was computed from such memory, or was copied to
    or from pinned memory by `copy_`.

    Args:
        schedule: When copies run. Races are found with either; wrong values may need the right one.

    Yields:
        The device.

    Raises:
        RaceError: At the end, if accesses were not ordered; names both places in the code.

    Example:
        >>> from accel_state.streams import device_streams
        >>> def upload(values, *, wait):
        ...     streams = device_streams(torch.device("cpu"))
        ...     host = streams.pinned(values.nbytes).view(values.dtype).copy_(values)
        ...     target = streams.empty(values.nbytes).view(values.dtype)
        ...     side = streams.new_stream()
        ...     side.wait_stream(streams.current_stream())
        ...     streams.record_stream(target, side)
        ...     with streams.on(side):
        ...         streams.copy_(target, host)
        ...     if wait:
        ...         streams.current_stream().wait_stream(side)
        ...     return target
        >>> with late_device():
        ...     print(upload(torch.arange(3.0), wait=True) * 2)
        tensor([0., 2., 4.])
        >>> with late_device() as device:
        ...     print(upload(torch.arange(3.0), wait=False) * 2)
        ...     print(len(device.races), "race")
        ...     device.races.clear()
        tensor([nan, nan, nan])
        1 race
    """
    device = LateDevice(schedule)
    with override_streams("cpu", lambda _: device), device.watch():
        yield device
    device.finish()
