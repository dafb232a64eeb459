"""Streams, events, pinned buffers and asynchronous copies of a device; no other module handles them.

`device_streams(device)` returns the streams of a device that runs its work asynchronously, and None for a
device that does not, such as the CPU.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from accel_state.device_kinds import runtime_module

logger = logging.getLogger(__name__)


class DeviceStreams:
    """The streams, events and memory of an asynchronous device. All methods may be called from any thread.

    Streams and events are made by the device's own module, such as `torch.cuda`: the host spins on a
    `torch.Event` made directly, whatever its options (https://github.com/pytorch/pytorch/issues/189017), and
    until torch 2.10 a `torch.Stream` made directly is a context that one thread at a time may enter.

    Attributes:
        device: The device, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        if device.index is None:
            device = torch.device(device.type, self._module.current_device())
        self.device = device

    def set_current(self) -> None:
        """Make the device this thread's current device; to be called first in a thread that uses it.

        A thread starts on device 0, and the end of an `on` block would create a context there.
        """
        self._module.set_device(self.device)

    def new_stream(self) -> torch.Stream:
        """Create a stream."""
        return self._module.Stream(self.device)

    def current_stream(self) -> torch.Stream:
        """Return the stream on which this thread's operators run."""
        return self._module.current_stream(self.device)

    def on(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Run this thread's operators on `stream`, and make its device current, within the block."""
        return self._module.stream(stream)

    def new_event(self) -> torch.Event:
        """Create an event on which the host can block without spinning."""
        return self._module.Event(blocking=True)

    def empty(self, nbytes: int) -> Tensor:
        """Allocate uint8 device memory of shape `(nbytes,)` that belongs to this thread's current stream.

        The memory may have been freed just now by work of the current stream that still runs: another stream
        must wait for the current one before it writes there.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Tensor:
        """Allocate a uint8 pinned (page-locked) host buffer of shape `(nbytes,)`.

        Once freed, it is reused only after the copies from and to it that were submitted by then. Code that
        reads or writes it on the host must wait for them with an event.

        Raises:
            RuntimeError: The system does not allow this process to pin more; see `pinned_if_possible`.
        """
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def copy_(self, target: Tensor, source: Tensor) -> None:
        """Copy between pinned host memory and the device, on the current stream, without waiting."""
        target.copy_(source, non_blocking=True)

    def copy_pageable_(self, target: Tensor, source: Tensor) -> None:
        """Copy between host memory that is not pinned and the device, on the current stream, and wait."""
        target.copy_(source)

    def record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        """Reuse a device tensor's memory, once freed, only after the work submitted to `stream` by then."""
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Block the host until all work of all streams of the device is done."""
        self._module.synchronize(self.device)


def device_streams(device: torch.device) -> DeviceStreams | None:
    """Return the streams of a device, or None if it has none and every copy is done when it returns."""
    # torch.cpu has the same functions, without effect; torch.mps has streams, but no current device.
    if device.type == "cpu":
        return None
    module = getattr(torch, device.type, None)
    has_streams = all(hasattr(module, name) for name in ("Stream", "Event", "stream", "set_device"))
    return DeviceStreams(device) if has_streams else None


def pinned_if_possible(streams: DeviceStreams, nbytes: int) -> Tensor | None:
    """Allocate a pinned host buffer; return None, and log why, where no more can be pinned.

    WSL2 and containers limit pinned memory per process. Without it copies are slower, and the host waits.
    """
    try:
        return streams.pinned(nbytes)
    except RuntimeError as error:
        logger.warning("Host memory could not be pinned (%s): copies are slower.", str(error).splitlines()[0])
        return None


def synchronize(device: torch.device) -> None:
    """Block the host until a device has done all its work, whether or not it has streams."""
    streams = device_streams(device)
    if streams is not None:
        streams.synchronize()
    elif device.type != "cpu":
        (runtime_module(device) or torch.accelerator).synchronize(device)
