"""Streams, events, pinned buffers and asynchronous copies of a device: no other module touches them.

`device_streams(device)` returns the streams of a device that runs its work asynchronously, and None for one
that does not, such as the CPU. Tests run on the late device of `accel_state.testing`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from accel_state.devices.kinds import own_runtime_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager

    from torch import Tensor


class Event(Protocol):
    """A point in a stream's work. One that was never recorded counts as reached."""

    def record(self, stream: Any) -> None:
        """Move the event to the end of what `stream` was given so far."""
        ...

    def synchronize(self) -> None:
        """Block the host, without spinning, until the event is reached."""
        ...

    def query(self) -> bool:
        """Whether the event is reached."""
        ...


class Stream(Protocol):
    """A queue of device work that runs in order. Only events order the work of different streams."""

    def wait_event(self, event: Any) -> None:
        """Let later work of this stream wait, on the device, for an event."""
        ...

    def wait_stream(self, stream: Any) -> None:
        """Let later work of this stream wait, on the device, for all that `stream` was given so far."""
        ...

    def synchronize(self) -> None:
        """Block the host until everything the stream was given is done."""
        ...


class DeviceStreams(Protocol):
    """What an asynchronous device offers. All methods may be called from any thread."""

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        ...

    def new_stream(self) -> Stream:
        """Create a stream."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream to which this thread's operators go."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Send this thread's operators to `stream` within the block."""
        ...

    def new_event(self) -> Event:
        """Create an event on which the host can block without spinning."""
        ...

    def empty(self, nbytes: int) -> Tensor:
        """Allocate uint8 device memory of shape `(nbytes,)` that belongs to this thread's current stream.

        The memory may have been freed just now by work of the current stream that still runs: another stream
        must wait for the current one before it writes there.
        """
        ...

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate a uint8 pinned (page-locked) host buffer of shape `(nbytes,)`.

        Once freed, it is reused only after the copies from and to it that streams have by then. Who writes or
        reads it on the host waits for them with an event.
        """
        ...

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned host memory and the device, on the current stream, without waiting."""
        ...

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Reuse a device tensor's memory, once freed, only after the work that `stream` has by then."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work of all streams of the device is done."""
        ...


class _TorchStreams:
    """The `DeviceStreams` of a real accelerator, through torch's device-independent API."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device

    def new_stream(self) -> Any:
        return torch.Stream(self.device)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return stream  # it also makes its device current

    def new_event(self) -> Any:
        return torch.Event(self.device, blocking=True)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy_(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


_ASYNCHRONOUS = ("cuda", "xpu")
"""Device types whose copies overlap with computation through streams of torch's device-independent API."""

replaced_streams: dict[str, Callable[[torch.device], DeviceStreams | None]] = {}
"""Streams that tests put in place of a device type's own; empty otherwise."""


def device_streams(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device, or None if it has none and every copy is done when it returns."""
    kind = device.type
    override = replaced_streams.get(kind)
    if override is not None:
        return override(device)
    return _TorchStreams(device) if kind in _ASYNCHRONOUS else None


def synchronize(device: torch.device) -> None:
    """Block the host until a device has done all its work, whether or not it has streams."""
    streams = device_streams(device)
    if streams is not None:
        streams.synchronize()
    elif device.type != "cpu":
        (own_runtime_of(device) or torch.accelerator).synchronize(device)


@contextmanager
def override_streams(
    device_type: str, make: Callable[[torch.device], DeviceStreams | None]
) -> Generator[None]:
    """Replace the streams of a device type within a block. For tests."""
    before = replaced_streams.get(device_type)
    replaced_streams[device_type] = make
    try:
        yield
    finally:
        if before is None:
            del replaced_streams[device_type]
        else:
            replaced_streams[device_type] = before
