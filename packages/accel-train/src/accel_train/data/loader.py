"""Loader of batches that this rank reads itself; transfer of batches to its device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accel_ops.tree import recursively_apply, send_to_device, walk
from accel_state.device_kinds import runtime_module
from accel_state.labels import RNGType
from accel_state.rng import synchronize_rng_states
from accel_state.streams import DeviceStreams, device_streams
from accel_state.torch_private import pin_memory
from accel_train.data.adapter import PreparedLoader
from accel_train.data.reading import T_co
from accel_train.data.shards import BatchWithMeta

logger = logging.getLogger(__name__)


class DataLoaderShard(PreparedLoader[T_co]):
    """A torch loader that yields this rank's batches on its device, and marks the last one.

    `prepare_data_loader` creates it from a torch loader and shards the data; this class only reads.

    Args:
        dataset: The dataset to load.
        device: The device of batches; not moved if `None`.
        rng_types: The generators that are synchronised across ranks at the beginning of each epoch.
        synchronized_generator: The generator that `"generator"` in `rng_types` means.
        skip_batches: Number of batches that the first iteration skips; later ones are complete.
        use_stateful_dataloader: Read through torchdata's `StatefulDataLoader`.
        _drop_last: Whether an incomplete last batch is dropped.
        _non_blocking: Whether a batch is copied to the device while the loop computes on the previous one.
        torch_device_mesh: The device mesh; ranks that differ along some of its axes only have the
            same batches.
        iteration: The first epoch.
        **kwargs: As for `torch.utils.data.DataLoader`.

    Example:
        >>> loader = DataLoaderShard(list(range(5)), batch_size=2)
        >>> [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
        [([0, 1], False), ([2, 3], False), ([4], True)]
    """

    def __init__(
        self,
        dataset: Any,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            skip_batches=skip_batches,
            use_stateful_dataloader=use_stateful_dataloader,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            _drop_last=_drop_last,
            **kwargs,
        )
        self.device = None if device is None else torch.device(device)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._non_blocking = _non_blocking

    def __iter__(self) -> Generator[T_co]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch says less
        """Yield this rank's batches."""
        return self._pass(
            batch_transfer(self.device, prefetching=self._non_blocking or self.pin_memory),
            before=self._synchronize,
        )

    def _synchronize(self) -> None:
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)


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
        recorded = Recorded(device, runtime.flush)
        return BatchTransfer(recorded.finish_copy, recorded.start_copy)
    return BatchTransfer(lambda batch: send_to_device(batch, device, non_blocking=prefetching))


@dataclass(frozen=True, slots=True)
class BatchTransfer:
    """The transfer of batches to a loader's device; without functions, batches are not moved.

    Args:
        finish_copy: Called with a batch right before it is yielded.
        start_copy: Called with a batch (or `BatchWithMeta`) once it is read, one batch ahead.
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

    def start_copy(self, item: Any) -> Any:
        """Start the copy of a batch."""
        if type(item) is BatchWithMeta:
            return replace(item, batch=self._start(item.batch))
        return self._start(item)

    def finish_copy(self, pending: PendingCopy) -> Any:
        """Make the current stream wait for the batch; return the batch."""
        current = self._streams.current_stream()
        current.wait_event(pending.arrived)
        for _, leaf in walk(pending.batch):
            if isinstance(leaf, torch.Tensor):
                if leaf.device == self._streams.device:
                    self._streams.record_stream(leaf, current)
            elif callable(record := getattr(leaf, "record_stream", None)):
                record(current)
        return pending.batch

    def _start(self, batch: Any) -> PendingCopy:
        pinned = _pinned(batch)
        hidden = any(_hides_tensors(leaf) for _, leaf in walk(batch))
        stream = self._streams.current_stream() if hidden else self._stream
        arrived = self._streams.new_event()
        with self._streams.on(stream):
            moved = send_to_device(pinned, self._streams.device, non_blocking=True)
            arrived.record(stream)
        return PendingCopy(moved, arrived)


@dataclass(slots=True)
class PendingCopy:
    """A batch whose copy to the device is pending."""

    batch: Any
    arrived: torch.Event


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


class Recorded:
    """Copy batches to a lazy device, and execute the recorded operations before each batch."""

    def __init__(self, device: torch.device, flush: Callable[[], None]) -> None:
        self._device = device
        self._flush = flush
        self._shapes: list[tuple[int, ...]] | None = None

    def start_copy(self, item: Any) -> Any:
        """Start the copy of a batch."""
        if type(item) is BatchWithMeta:
            return replace(item, batch=send_to_device(item.batch, self._device, non_blocking=True))
        return send_to_device(item, self._device, non_blocking=True)

    def finish_copy(self, batch: Any) -> Any:
        """Execute the operations recorded for the previous batch; return this batch."""
        self._flush()
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


@functools.cache
def warn_of_padding() -> None:
    """Warn that a last batch is completed to keep its shape; once per process."""
    logger.warning(
        "The device recompiles for every shape, so a shorter last batch is completed with samples from "
        "the epoch's beginning, which gather_for_metrics removes. Use drop_last=True of the DataLoader "
        "to drop this batch, or even_batches=False of DataLoaderConfiguration to yield it unchanged."
    )
