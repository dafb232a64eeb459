"""Host-to-device transfer of batches: none, when they are yielded, or prefetched on a copy stream."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from accel_ops.move import send_to_device
from accel_ops.tree import recursively_apply, walk
from accel_state.devices.kinds import own_runtime_of
from accel_state.streams import device_streams
from accel_train.data.iterable_shard import BatchWithMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel_state.streams import DeviceStreams, Event

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """The transfer of batches to the device of a loader; without functions they stay as they are.

    Args:
        finish_copy: Called with a batch right before it is yielded.
        start_copy: Called with a batch (or `BatchWithMeta`) when it was read, one ahead.
    """

    finish_copy: Callable[[Any], Any] | None = None
    start_copy: Callable[[Any], Any] | None = None


class CopyStream:
    """Prefetch batches to the device on a copy stream, while the one before is computed with.

    Work of the current stream on a batch waits for its copy, and its memory is kept until that work is done.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams
        self._stream = streams.new_stream()

    def start_copy(self, item: Any) -> Any:
        """Begin the copy of a batch."""
        if type(item) is BatchWithMeta:
            return replace(item, batch=self._start(item.batch))
        return self._start(item)

    def finish_copy(self, flight: PendingCopy) -> Any:
        """Let the current stream wait for the batch."""
        current = self._streams.current_stream()
        current.wait_event(flight.arrived)
        for _, leaf in walk(flight.batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.device == self._streams.device:
                    self._streams.record_stream(leaf, current)
            elif callable(record := getattr(leaf, "record_stream", None)):
                record(current)
        return flight.batch

    def _start(self, batch: Any) -> PendingCopy:
        pinned = _pinned(batch)
        hidden = any(_hides_tensors(leaf) for _, leaf in walk(batch))
        stream = self._streams.current_stream() if hidden else self._stream
        arrived = self._streams.new_event()
        with self._streams.on(stream):
            moved = send_to_device(pinned, self._streams.device, non_blocking=True)
            arrived.record(stream)
        return PendingCopy(moved, arrived)


class Recorded:
    """Batches of a device that records operations, executed before each; copied one ahead."""

    def __init__(self, device: torch.device, flush: Callable[[], None]) -> None:
        self._device = device
        self._flush = flush
        self._shapes: list[tuple[int, ...]] | None = None

    def start_copy(self, item: Any) -> Any:
        """Begin the copy of a batch."""
        if type(item) is BatchWithMeta:
            return replace(item, batch=send_to_device(item.batch, self._device, non_blocking=True))
        return send_to_device(item, self._device, non_blocking=True)

    def finish_copy(self, batch: Any) -> Any:
        """Execute what the loop has recorded for the batch before, and yield this one."""
        self._flush()
        shapes = [tuple(leaf.shape) for _, leaf in walk(batch) if isinstance(leaf, torch.Tensor)]
        if self._shapes is None:
            self._shapes = shapes
        elif shapes != self._shapes:
            warn_of_shapes()
        return batch


@functools.cache
def warn_of_shapes() -> None:
    """Warn that batches have different shapes; once per process."""
    logger.warning(
        "Batches have different shapes, and the loop is compiled anew for every combination of shapes: "
        "drop_last=True of the DataLoader, or padding in its collate_fn, keeps them equal."
    )


@functools.cache
def warn_of_padding() -> None:
    """Warn that a last batch is completed for the sake of its shape; once per process."""
    logger.warning(
        "The device compiles anew for every shape: a last batch that is shorter is completed with samples "
        "from the epoch's beginning, which gather_for_metrics leaves out. drop_last=True of the DataLoader "
        "drops it; even_batches=False of DataLoaderConfiguration yields it as it is."
    )


def _pinned(batch: Any) -> Any:
    """Pin the tensors of a batch that can be pinned, strided ones on the CPU, and those of its objects."""
    if all(map(_can_be_pinned, (leaf for _, leaf in walk(batch)))):
        return pin_memory(batch)  # as it is, where it is pinned
    return recursively_apply(
        lambda leaf: pin_memory(leaf) if _can_be_pinned(leaf) else leaf,
        batch,
        test_type=lambda leaf: callable(getattr(leaf, "pin_memory", None)),
    )


def _can_be_pinned(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (leaf.is_cpu and leaf.layout is torch.strided)


def _hides_tensors(leaf: Any) -> bool:
    """Whether an object moves tensors that nobody can record: the stream that uses them must own them."""
    return (
        not isinstance(leaf, (torch.Tensor, type))
        and callable(getattr(leaf, "to", None))
        and not callable(getattr(leaf, "record_stream", None))
    )


@dataclass(slots=True)
class PendingCopy:
    """A batch whose copy to the device is pending."""

    batch: Any
    arrived: Event


def to_cpu(batch: Any) -> Any:
    """Move a batch to the CPU, at next to no cost where it is there already."""
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


def batch_transfer(device: torch.device | None, *, prefetching: bool) -> BatchTransfer:
    """Choose how batches get to a device."""
    if device is None:
        return BatchTransfer()
    if prefetching and (streams := device_streams(device)) is not None:
        side = CopyStream(streams)
        return BatchTransfer(side.finish_copy, side.start_copy)
    if device.type == "cpu":
        return BatchTransfer(to_cpu)
    if (runtime := own_runtime_of(device)) is not None:
        recorded = Recorded(device, runtime.flush)
        return BatchTransfer(recorded.finish_copy, recorded.start_copy)
    return BatchTransfer(lambda batch: send_to_device(batch, device, non_blocking=prefetching))
