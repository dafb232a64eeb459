"""Streams, events, pinned buffers and asynchronous copies of a device; no other module handles them.

`device_streams(device)` returns the streams of a device that runs its work asynchronously, and None for a
device that does not, such as the CPU. Tests use the fake `late_device` of `accel_state.testing`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from accel_state.device_kinds import runtime_module

logger = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a stream's work. An event that was never recorded counts as reached."""

    def record(self, stream: Any) -> None:
        """Record the event at the end of the work submitted to `stream` so far."""
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
        """Let later work of this stream wait, on the device, for all work submitted to `stream` so far."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work submitted to the stream is done."""
        ...


class DeviceStreams(Protocol):
    """The streams, events and memory of an asynchronous device. All methods may be called from any thread."""

    @property
    def device(self) -> torch.device:
        """The device, with its index."""
        ...

    def set_current(self) -> None:
        """Make the device this thread's current device; to be called first in a thread that uses it.

        A thread starts on device 0, and the end of an `on` block would create a context there.
        """
        ...

    def new_stream(self) -> Stream:
        """Create a stream."""
        ...

    def current_stream(self) -> Stream:
        """Return the stream on which this thread's operators run."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Run this thread's operators on `stream`, and make its device current, within the block."""
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

        Once freed, it is reused only after the copies from and to it that were submitted by then. Code that
        reads or writes it on the host must wait for them with an event.

        Raises:
            RuntimeError: The system does not allow this process to pin more; see `pinned_if_possible`.
        """
        ...

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned host memory and the device, on the current stream, without waiting."""
        ...

    def copy_pageable_(self, target: Tensor, source: Tensor) -> None:
        """Copy between host memory that is not pinned and the device, on the current stream, and wait."""
        ...

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """Reuse a device tensor's memory, once freed, only after the work submitted to `stream` by then."""
        ...

    def synchronize(self) -> None:
        """Block the host until all work of all streams of the device is done."""
        ...


class _TorchStreams:
    """The `DeviceStreams` of a real accelerator, through the module of torch for its type.

    It avoids torch's device-independent classes: the host spins on their events, whatever their options
    (https://github.com/pytorch/pytorch/issues/189017), and until torch 2.10 their streams are contexts that
    one thread at a time may enter.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        if device.index is None:
            device = torch.device(device.type, self._module.current_device())
        self.device = device

    def set_current(self) -> None:
        self._module.set_device(self.device)

    def new_stream(self) -> Any:
        return self._module.Stream(self.device)

    def current_stream(self) -> Any:
        return self._module.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._module.stream(stream)  # it also makes its device current

    def new_event(self) -> Any:
        return self._module.Event(blocking=True)

    def empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy_(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def copy_pageable_(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        self._module.synchronize(self.device)


replaced_streams: dict[str, Callable[[torch.device], DeviceStreams | None]] = {}
"""Streams by which tests replace those of a device type; empty otherwise."""


def device_streams(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device, or None if it has none and every copy is done when it returns."""
    kind = device.type
    override = replaced_streams.get(kind)
    if override is not None:
        return override(device)
    # torch.cpu has the same functions, without effect; torch.mps has streams, but no current device.
    module = None if kind == "cpu" else getattr(torch, kind, None)
    has_streams = all(hasattr(module, name) for name in ("Stream", "Event", "stream", "set_device"))
    return _TorchStreams(device) if has_streams else None


def pinned_if_possible(streams: DeviceStreams, nbytes: int) -> Tensor | None:
    """Allocate a pinned host buffer; return None, and log why, where no more can be pinned.

    WSL2 and containers limit pinned memory per process. Without it copies are slower, and the host waits.
    """
    try:
        return streams.pinned(nbytes)
    except RuntimeError as error:
        logger.warning("Host memory could not be pinned (%s): copies are slower.", str(error).splitlines()[0])
        return None


def tensor_streams(tensor: Tensor) -> DeviceStreams | None:
    """Return the streams of a tensor's device; for a CPU tensor, without creating a `torch.device`."""
    return None if tensor.is_cpu and not replaced_streams else device_streams(tensor.device)


def synchronize(device: torch.device) -> None:
    """Block the host until a device has done all its work, whether or not it has streams."""
    streams = device_streams(device)
    if streams is not None:
        streams.synchronize()
    elif device.type != "cpu":
        (runtime_module(device) or torch.accelerator).synchronize(device)


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
