"""Streams as queues of copies, which run when somebody waits for them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_state.testing.clocks import Race
from accel_state.testing.storages import byte_range

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor

    from accel_state.testing.clocks import Clock
    from accel_state.testing.late import LateDevice

Schedule = Literal["late", "early"]
"""When copies run: at the last moment that waits permit, or as soon as they are issued."""


class LateStream:
    """A queue of copies that run when somebody waits for them."""

    def __init__(self, device: LateDevice, name: str) -> None:
        self.device = device
        self.name = name
        self.submitted = 0
        self.done = 0
        self._queue: deque[Callable[[], None]] = deque()
        self._context: AbstractContextManager[None] | None = None

    def __enter__(self) -> LateStream:
        """Do what torch's own streams did before torch 2.11: keep the context in the stream.

        Raises:
            RuntimeError: The stream is entered already, by whatever thread.
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
        """Run the first `until` pieces of work that the stream ever got, or all of them."""
        until = self.submitted if until is None else until
        while self.done < until:
            self._queue.popleft()()
            self.done += 1

    def reaches_end(self) -> Callable[[], bool]:
        """Return what tells whether all that the stream has now is done."""
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
        """Order later work after all that a stream has."""
        event = LateEvent(self.device)
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Run everything the stream has."""
        event = LateEvent(self.device)
        event.record(self)
        event.synchronize()


class LateEvent:
    """A position in a stream's queue, with what the thread that recorded it knew the stream to have."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self.point: tuple[LateStream, int, Clock] | None = None

    def record(self, stream: Any) -> None:
        """Note the end of the stream's queue."""
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
        """Answer no as long as nothing has waited; but the work is done before the next question."""
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
        target: Where to, as a view that keeps no memory of the device from being freed.
        source: Where from, likewise.
        where: Place in the code.
        expected: What the source held when the copy was issued, if nothing may change it.
    """

    target: Tensor
    source: Tensor
    where: str
    expected: Tensor | None = None

    def overlaps(self, other: Copy) -> bool:
        """Whether a copy that runs earlier may change what this one's operands hold."""
        mine = [_addresses(self.target), _addresses(self.source)]
        return any(
            a[0] < b[1] and b[0] < a[1]
            for a in mine
            for b in (_addresses(other.target), _addresses(other.source))
        )

    def poison_target(self) -> None:
        """Make the target's old values unreadable; they are gone anyway."""
        if self.target.dtype is not torch.bool:
            floating = self.target.is_floating_point() or self.target.is_complex()
            with torch.no_grad():
                self.target.fill_(math.nan if floating else _LOWEST.get(self.target.dtype, -1))

    def run(self) -> list[Race]:
        """Copy the bytes; return what was done to the source meanwhile."""
        found: list[Race] = []
        if self.expected is not None and not _same_bytes(self.expected, self.source):
            found = [
                Race(
                    f"a copy\n    at {self.where}",
                    "a change of the memory that a copy reads, by the host or by a stream",
                )
            ]
        with torch.no_grad():
            self.target.copy_(self.source)
        return found


_LOWEST = {torch.uint8: 255, torch.uint16: 65535, torch.uint32: 2**32 - 1}


def _addresses(tensor: Tensor) -> tuple[int, int]:
    start, end = byte_range(tensor)
    base = tensor.untyped_storage().data_ptr()
    return base + start, base + end


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
