"""Transfer of batches to the device of a loader."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from accel_ops.tree import recursively_apply, send_to_device, walk
from accel_state.device_kinds import runtime_module
from accel_state.streams import DeviceStreams, device_streams
from accel_state.torch_private import pin_memory

logger = logging.getLogger(__name__)


def batch_transfer(device: torch.device | None, *, prefetching: bool) -> BatchTransfer:
    """Choose how batches are copied to a device."""
    if device is None:
        return BatchTransfer()
    if prefetching and (streams := device_streams(device)) is not None:
        copies = CopyStream(streams)
        return BatchTransfer(copies.finish_copy, copies.start_copy)
    if device.type == "cpu":
        return BatchTransfer(to_cpu)
    if (runtime := runtime_module(device)) is not None:
        recorded = Recorded(runtime.flush)
        return BatchTransfer(
            recorded.finish_copy, lambda batch: send_to_device(batch, device, non_blocking=True)
        )
    return BatchTransfer(lambda batch: send_to_device(batch, device, non_blocking=prefetching))


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """The transfer of batches to a loader's device; without functions, batches are not moved.

    Args:
        finish_copy: Called with a batch right before it is yielded.
        start_copy: Called with a batch once it is read, one batch ahead.
    """

    finish_copy: Callable[[Any], Any] | None = None
    start_copy: Callable[[Any], Any] | None = None


class CopyStream:
    """Prefetch batches to the device on a copy stream.

    The current stream waits for the copy of a batch, and its memory is not reused before its work is done.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._stream = streams.new_stream()

    def start_copy(self, batch: Any) -> tuple[Any, torch.Event]:
        """Start the copy of a batch; return the batch, and when it has arrived."""
        pinned = _pinned(batch)
        hidden = any(_hides_tensors(leaf) for _, leaf in walk(batch))
        stream = self._streams.current_stream() if hidden else self._stream
        arrived = self._streams.new_event()
        with self._streams.on(stream):
            moved = send_to_device(pinned, self._streams.device, non_blocking=True)
            arrived.record(stream)
        return moved, arrived

    def finish_copy(self, pending: tuple[Any, torch.Event]) -> Any:
        """Make the current stream wait for the batch; return the batch."""
        batch, arrived = pending
        current = self._streams.current_stream()
        current.wait_event(arrived)
        for _, leaf in walk(batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.device == self._streams.device:
                    self._streams.record_stream(leaf, current)
            elif callable(record := getattr(leaf, "record_stream", None)):
                record(current)
        return batch


def _pinned(batch: Any) -> Any:
    """Pin the strided CPU tensors of a batch, and objects with a method `pin_memory`."""
    if all(map(_can_be_pinned, (leaf for _, leaf in walk(batch)))):
        return pin_memory(batch)  # returns tensors that are pinned already
    return recursively_apply(
        lambda leaf: pin_memory(leaf) if _can_be_pinned(leaf) else leaf,
        batch,
        test_type=lambda leaf: callable(getattr(leaf, "pin_memory", None)),
    )


def _can_be_pinned(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (leaf.is_cpu and leaf.layout is torch.strided)


def _hides_tensors(leaf: Any) -> bool:
    """Return whether an object hides tensors from `record_stream`; the current stream must copy them."""
    return (
        not isinstance(leaf, (torch.Tensor, type))
        and callable(getattr(leaf, "to", None))
        and not callable(getattr(leaf, "record_stream", None))
    )


@dataclass(eq=False)
class Recorded:
    """Execute the recorded operations of a lazy device before each batch."""

    flush: Callable[[], None]
    _shapes: list[tuple[int, ...]] | None = field(default=None, init=False)

    def finish_copy(self, batch: Any) -> Any:
        """Execute the operations recorded for the previous batch; return this batch."""
        self.flush()
        shapes = [tuple(leaf.shape) for _, leaf in walk(batch) if isinstance(leaf, torch.Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes:
            warn_of_shapes()
        return batch


_CPU = torch.device("cpu")


def to_cpu(batch: Any) -> Any:
    """Move a batch to the CPU, at almost no cost if it is on the CPU."""
    kind = type(batch)
    leaves: Iterable[Any]
    if kind is torch.Tensor:
        leaves = (batch,)
    elif kind is list or kind is tuple:
        leaves = batch
    elif kind is dict:
        leaves = batch.values()
    else:
        return send_to_device(batch, _CPU)
    for leaf in leaves:
        if type(leaf) is not torch.Tensor or not leaf.is_cpu:
            return send_to_device(batch, _CPU)
    return batch


@functools.cache
def warn_of_shapes() -> None:
    """Warn that batches have different shapes; once per process."""
    logger.warning(
        "Batches have different shapes, and the loop is recompiled for every combination of shapes. Use "
        "drop_last=True of the DataLoader, or padding in its collate_fn, to keep them equal."
    )
