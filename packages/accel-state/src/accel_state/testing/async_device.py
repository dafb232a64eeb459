"""`late_device`: a fake asynchronous device on the CPU whose copies run late; interception of operators."""

from __future__ import annotations

import re
import threading
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from accel_state.streams import override_streams
from accel_state.testing.async_memory import (
    Access,
    Actor,
    Block,
    Copy,
    HostThread,
    HostThreads,
    Kind,
    LateEvent,
    LateStream,
    Pool,
    Race,
    Schedule,
    Storages,
    byte_range,
    storage_id,
    user_line,
)
from accel_state.torch_private import TorchDispatchMode, is_traceable_wrapper_subclass, tree_leaves

_METADATA_ONLY = re.compile(r"^aten::(new_.*|.*_like|set_|resize_)$")
_WITHOUT_VALUES = re.compile(r"^aten::(new_empty.*|empty.*)$")
_TO_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::item"}
"""Operators that return their result to the host."""


class OperatorMode(TorchDispatchMode):
    """Report all operators of this thread to a device."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Register the operator's accesses; replace copies between pinned and device memory."""
        kwargs = kwargs or {}
        device = self._device
        leaves = tree_leaves((args, kwargs))
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # the operators on its inner tensors are dispatched next
        name = func._schema.name
        if device.is_inside or func.is_view:
            return func(*args, **kwargs)
        if name == "aten::copy_" and device.is_device_copy(*args[:2]):
            target, source, *more = args
            device.plain_copy(target, source, blocking=not (more[0] if more else kwargs.get("non_blocking")))
            return target
        reads, writes = _accesses(func, args, kwargs)
        actor = device.before_operator(name, reads, writes)
        outputs = func(*args, **kwargs)
        fresh: list[Tensor] = []
        if not _WITHOUT_VALUES.match(name):
            old = {storage_id(leaf) for leaf in leaves if _is_plain(leaf)}
            results = (leaf for leaf in tree_leaves(outputs) if _is_plain(leaf))
            fresh = [leaf for leaf in results if storage_id(leaf) not in old]
        device.after_operator(name, fresh, actor, waits=name in _TO_HOST)
        return outputs


class TransferMode(TorchFunctionMode):
    """Make `pin_memory`, `is_pinned` and `to` of this thread behave as with a device."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Emulate the function on the device, or call it."""
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return self._device.pin(args[0])
        if func is torch.Tensor.is_pinned:
            return self._device.is_pinned(args[0])
        if func is torch.Tensor.to and self._device.is_pinned(args[0]):
            return self._to(*args, **kwargs)
        return func(*args, **kwargs)

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        torch_c: Any = torch._C
        device, dtype, non_blocking, _ = torch_c._nn._parse_to(*args, **kwargs)
        if device is None:
            return tensor.to(*args, copy=copy, **kwargs)
        moved = self._device.upload(tensor, blocking=not non_blocking)
        return moved if dtype is None else moved.to(dtype)


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and the tensors that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    schema = func._schema
    if _METADATA_ONLY.match(schema.name):
        return [], []
    named = ((argument, kwargs[argument.name]) for argument in schema.arguments if argument.name in kwargs)
    for argument, value in (*zip(schema.arguments, args, strict=False), *named):
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue  # a view of it is returned
        tensors = [leaf for leaf in tree_leaves(value) if _is_plain(leaf)]
        if alias is not None:
            writes += tensors
        else:
            reads += tensors
    return reads, writes


def _is_plain(value: Any) -> bool:
    """Return whether a value is a tensor whose memory can be tracked."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


class RaceError(AssertionError):
    """Unordered accesses to device or pinned memory.

    Args:
        races: All races that were found.
    """

    def __init__(self, races: Sequence[Race]) -> None:
        super().__init__(f"unordered accesses ({len(races)}):\n" + "\n".join(str(race) for race in races))
        self.races = tuple(races)


class LateHost:
    """The state shared by the devices of one block: host memory, host threads, and the races found.

    Args:
        schedule: When copies run.
        capacity: Bytes of each device.
        pinned_capacity: Bytes of host memory that can be pinned.
        devices: How many devices there are.

    Attributes:
        contexts: The indices of the devices that any thread has made current, or allocated on.
        pinned_peak: The most bytes that were pinned at a time.
    """

    def __init__(
        self,
        schedule: Schedule = "late",
        *,
        capacity: int | None = None,
        pinned_capacity: int | None = None,
        devices: int = 1,
    ) -> None:
        self.schedule: Schedule = schedule
        self.capacity = capacity
        self.pinned_capacity = pinned_capacity
        self.lock = threading.RLock()
        self.threads = HostThreads()
        self.storages = Storages()
        self.pool = Pool()
        self.pending: list[Copy] = []
        self.races: list[Race] = []
        self.contexts: set[int] = set()
        self.pinned_peak = 0
        self.devices = tuple(LateDevice(self, index) for index in range(devices))

    @property
    def thread(self) -> HostThread:
        """The calling host thread."""
        return self.threads.thread

    def device(self, device: torch.device) -> LateDevice:
        """Return a fake device; this thread's current device if `device` has no index."""
        return self.devices[self.thread.device if device.index is None else device.index]


class LateDevice:
    """The streams of a device that delays work as long as allowed. Use `late_device` to create one.

    Args:
        host: The state shared with the other devices of the block.
        index: Its index.

    Attributes:
        device: The device: the CPU, with an index if that is not 0.
        streams: Its streams; the default stream is the first.
    """

    def __init__(self, host: LateHost, index: int) -> None:
        self.host = host
        self.index = index
        self.device = torch.device("cpu", index) if index else torch.device("cpu")
        self.streams: list[LateStream] = []
        self._default = self.new_stream()

    @property
    def schedule(self) -> Schedule:
        """When copies run."""
        return self.host.schedule

    @property
    def races(self) -> list[Race]:
        """The races found so far, on any device."""
        return self.host.races

    @property
    def pending(self) -> int:
        """Number of copies that were issued and have not run."""
        return len(self.host.pending)

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in the device's own code."""
        return self.host.thread.inside

    @property
    def nbytes(self) -> int:
        """The bytes in use, without freed memory that waits for `record_stream`, as on a device."""
        with self.own_code():
            return self.host.storages.nbytes(Kind.DEVICE, self)

    def new_stream(self) -> LateStream:
        """Create a stream."""
        number = len(self.streams) + 1
        name = "the default stream" if number == 1 else f"stream {number}"
        self.streams.append(LateStream(self, f"{name} of device {self.index}" if self.index else name))
        return self.streams[-1]

    def current_stream(self) -> LateStream:
        """Return the stream on which this thread's operators run."""
        return self.host.thread.streams.get(self.index, self._default)

    def set_current(self) -> None:
        """Make the device this thread's current device, which creates a context on it."""
        self.host.thread.device = self.index
        self.host.contexts.add(self.index)

    @contextmanager
    def on(self, stream: Any) -> Generator[None]:
        """Run this thread's operators on a stream, and make its device current, within the block."""
        thread = self.host.thread
        before, former = stream.device.current_stream(), self.host.devices[thread.device]
        if former is not stream.device:
            stream.device.set_current()
        thread.streams[stream.device.index] = stream
        try:
            yield
        finally:
            thread.streams[stream.device.index] = before
            if former is not stream.device:
                former.set_current()

    def new_event(self) -> LateEvent:
        """Create an event."""
        return LateEvent(self)

    def empty(self, nbytes: int) -> Tensor:
        """Allocate poisoned memory, preferably the block that the current stream freed last.

        Raises:
            torch.OutOfMemoryError: The capacity is exceeded.
        """
        with self.own_code():
            stream = self.current_stream()
            self._require(nbytes)
            self.host.contexts.add(self.index)
            tensor, block = self._allocate(nbytes, Kind.DEVICE, stream)
            self._access(self._begin(stream), tensor, "the allocation", block.where, writes=True)
            stream.submit(block.poison)
            return tensor

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate a poisoned pinned host buffer.

        Raises:
            RuntimeError: No more can be pinned.
        """
        with self.own_code():
            total, limit = self.host.storages.nbytes(Kind.PINNED) + nbytes, self.host.pinned_capacity
            if limit is not None and total > limit:
                raise RuntimeError(f"{total} bytes would be pinned, {limit} can be")
            self.host.pinned_peak = max(self.host.pinned_peak, total)
            tensor, block = self._allocate(nbytes, Kind.PINNED, None)
            block.poison()
            return tensor

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy on the current stream.

        Raises:
            ValueError: Not exactly one of the two is pinned memory.
        """
        with self.own_code():
            kinds = [self.host.storages.kind(tensor) for tensor in (target, source)]
            if kinds.count(Kind.PINNED) != 1:
                raise ValueError(
                    f"a copy from {kinds[1].name.lower()} to {kinds[0].name.lower()} memory at "
                    f"{user_line()} is not between pinned host memory, made by `pinned`, and the device: "
                    f"a real device would copy it while the host waits"
                )
            self._copy(target, source)

    def copy_pageable_(self, target: Tensor, source: Tensor) -> None:
        """Copy on the current stream, and wait for it."""
        self.plain_copy(target, source, blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep a freed tensor's memory until the work submitted to `stream` by then is done."""
        with self.own_code():
            block = self.host.storages.find(tensor).block
            if block is not None:
                block.recorded.append(stream)

    def synchronize(self) -> None:
        """Run all work of all streams."""
        for stream in list(self.streams):
            stream.synchronize()

    @contextmanager
    def watch(self) -> Generator[None]:
        """Track this thread's operators within the block.

        `late_device` does this for the thread that enters it. Calls of `DeviceStreams` by other threads, and
        changes of memory that a pending copy reads, are always tracked; operators of other threads only in
        such a block.
        """
        with OperatorMode(self), TransferMode(self):
            yield

    def check(self) -> None:
        """Raise if races were found so far.

        Raises:
            RaceError: Accesses were not ordered.
        """
        with self.own_code():
            if self.races:
                raise RaceError(self.races)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Emulate `tensor.is_pinned()`."""
        return tensor.layout is torch.strided and self.host.storages.kind(tensor) is Kind.PINNED

    def pin(self, tensor: Tensor) -> Tensor:
        """Emulate `tensor.pin_memory()`."""
        if self.is_pinned(tensor):
            return tensor
        return _like(self.pinned(tensor.numel() * tensor.itemsize), tensor).copy_(tensor)

    def upload(self, tensor: Tensor, *, blocking: bool) -> Tensor:
        """Emulate `tensor.to(device)` of pinned memory."""
        target = _like(self.empty(tensor.numel() * tensor.itemsize), tensor)
        self.plain_copy(target, tensor, blocking=blocking)
        return target

    def is_device_copy(self, target: Tensor, source: Tensor) -> bool:
        """Return whether `target.copy_(source)` is a copy between pinned memory and known device memory."""
        if source.layout is not torch.strided or target.layout is not torch.strided:
            return False
        kinds = {self.host.storages.kind(tensor) for tensor in (target, source)}
        return kinds == {Kind.PINNED, Kind.DEVICE}

    def plain_copy(self, target: Tensor, source: Tensor, *, blocking: bool) -> None:
        """Emulate `target.copy_(source)` between pinned and device memory."""
        with self.own_code():
            self._copy(target, source)
        if blocking:
            self.current_stream().synchronize()

    def before_operator(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Actor | None:
        """Register an operator's accesses.

        Returns:
            The stream's actor for an operator on device memory, the host thread for an operator on pinned
            memory only; None if its tensors could be in either.

        Raises:
            RuntimeError: Its tensors are on different devices.
        """
        with self.own_code():
            touched = [*((tensor, False) for tensor in reads), *((tensor, True) for tensor in writes)]
            known = [self.host.storages.find(tensor) for tensor, _ in touched]
            kinds = {tracked.kind for tracked in known}
            devices = {tracked.device.index for tracked in known if tracked.device is not None}
            if len(devices) > 1 and name != "aten::copy_":
                raise RuntimeError(f"{name} has tensors on devices {sorted(devices)} at {user_line()}")
            stream = self.host.devices[min(devices, default=self.host.thread.device)].current_stream()
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
        """Register an operator's results, in the memory of its inputs; `waits` if the host receives them.

        Raises:
            torch.OutOfMemoryError: The capacity is exceeded.
        """
        with self.own_code():
            stream = self.current_stream() if actor is None else actor.stream
            if stream is None:  # pinned memory only
                return
            where = user_line()
            for tensor in outputs:
                tracked = self.host.storages.find(tensor)
                if actor is not None and tracked.kind is not Kind.DEVICE:
                    stream.device._require(tracked.nbytes)
                    tracked.kind, tracked.device = Kind.DEVICE, stream.device
                self._access(self.host.thread.at(stream), tensor, name, where, writes=True)
            if actor is not None and waits:
                stream.synchronize()

    @contextmanager
    def own_code(self) -> Generator[None]:
        """Hold the lock, hide operators from `watch`, and register freed memory."""
        with self.host.lock:
            thread = self.host.thread
            before = thread.inside
            thread.inside = True
            try:
                if not before:
                    for block in self.host.pool.freed():
                        self._free(block)
                yield
            finally:
                thread.inside = before

    def _require(self, nbytes: int) -> None:
        """Raise if some bytes do not fit in addition to those in use."""
        capacity, used = self.host.capacity, self.host.storages.nbytes(Kind.DEVICE, self)
        if capacity is not None and used + nbytes > capacity:
            raise torch.OutOfMemoryError(
                f"{used} of {capacity} bytes of device {self.index} are in use: {nbytes} more do not fit"
            )

    def _begin(self, stream: LateStream | None) -> Actor:
        """Count an item of work that this thread submits to a stream, or does itself."""
        actor = self.host.thread.actor if stream is None else self.host.thread.at(stream)
        actor.clock[actor.number] = actor.clock.get(actor.number, 0) + 1
        return actor

    def _access(self, actor: Actor, tensor: Tensor, what: str, where: str, *, writes: bool) -> None:
        tracked = self.host.storages.find(tensor)
        start, end = byte_range(tensor)
        if start == end or (actor.stream is None and tracked.kind is Kind.UNKNOWN):
            return
        access = Access(actor, actor.clock.get(actor.number, 0), writes, start, end, what, where)
        if tracked.kind is not Kind.UNKNOWN:
            self.races.extend(tracked.history.conflicts(access))
        tracked.history.add(access)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        stream = self.current_stream()
        where = user_line()
        actor = self._begin(stream)
        for tensor, writes in ((source, False), (target, True)):
            tracked = self.host.storages.find(tensor)
            if tracked.kind is Kind.UNKNOWN:
                tracked.kind, tracked.device = Kind.DEVICE, self
            self._access(actor, tensor, "a copy", where, writes=writes)
        copy = Copy(self._alias(target), self._alias(source), where)
        if not any(other.overlaps(copy) for other in self.host.pending):
            copy.expected = copy.source.clone()
            if self.host.storages.kind(target) is Kind.PINNED:
                copy.poison_target()
        self.host.pending.append(copy)

        def run() -> None:
            self.host.pending.remove(copy)
            self.races.extend(copy.run())

        stream.submit(run)

    def _alias(self, tensor: Tensor) -> Tensor:
        """Alias a tensor's memory without keeping it alive, if the device has allocated it."""
        block = self.host.storages.find(tensor).block
        storage = (tensor if block is None else block.tensor()).untyped_storage()
        alias = torch.empty(0, dtype=tensor.dtype)
        return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _allocate(self, nbytes: int, kind: Kind, owner: LateStream | None) -> tuple[Tensor, Block]:
        block, tensor = self.host.pool.take(nbytes, owner)
        block.where = user_line()
        tracked = self.host.storages.find(tensor)
        tracked.kind, tracked.device = kind, None if owner is None else self
        tracked.nbytes, tracked.block, tracked.history = nbytes, block, block.history
        return tensor, block

    def _free(self, block: Block) -> None:
        """Return a block to its pool; find the streams that may still use it."""
        owner = block.owner
        known = self.host.threads.clock_of(owner)
        later = (access for access in block.history.accesses if not access.is_in(known))
        users = {access.actor.stream: access for access in later}
        streams = [stream for stream in users if stream is not None]
        if owner is not None:
            freed = (
                f"the end of the last use of memory of {owner.name}, without record_stream\n"
                f"    allocated at {block.where}"
            )
            self.races.extend(
                Race(str(users[stream]), freed) for stream in streams if stream not in block.recorded
            )
            streams = block.recorded
        block.until = [stream.reaches_end() for stream in streams]
        if not block.until and owner is not None:
            owner.submit(block.poison)
        self.host.pool.free_block(block)

    def finish(self) -> None:
        """Run pending copies, and `check`."""
        for device in self.host.devices:
            for stream in device.streams:
                with self.own_code():
                    stream.run()
        self.check()


def _like(flat: Tensor, tensor: Tensor) -> Tensor:
    """View bytes with shape, dtype and (if they leave no gaps) strides of another tensor."""
    strides = torch.empty_like(tensor, device="meta").stride()
    return flat.view(tensor.dtype).as_strided(tensor.size(), strides)


@contextmanager
def late_device(
    schedule: Schedule = "late",
    *,
    capacity: int | None = None,
    pinned_capacity: int | None = None,
    devices: int = 1,
) -> Generator[LateDevice]:
    """Turn the CPU into an asynchronous device that delays work as long as stream semantics allow.

    Within the block `device_streams(torch.device("cpu"))` is this device, and this thread's operators are
    watched. Device memory is memory that comes from `empty`, was computed from such memory, or was copied to
    or from pinned memory by `copy_`. The work of host threads is ordered if they synchronise by a lock (or a
    future, queue, event) created within the block, or by starting or joining a thread.

    Args:
        schedule: When copies run. Races are found with either; wrong values may need the right one.
        capacity: Bytes of each device; without end by default.
        pinned_capacity: Bytes of host memory that can be pinned; without end by default.
        devices: How many devices there are: `torch.device("cpu", 1)` is the second, as in
            `device.host.devices[1]`.

    Yields:
        The first device.

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
    host = LateHost(schedule, capacity=capacity, pinned_capacity=pinned_capacity, devices=devices)
    device = host.devices[0]
    with host.threads.watch():
        with override_streams("cpu", host.device), device.watch():
            yield device
        # Threads of the block may still run: their synchronisation is tracked as long as races are detected.
        device.finish()
