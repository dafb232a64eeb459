"""One pass over the data behind a loader: where it began, how far it is, and how to begin in the middle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

if TYPE_CHECKING:
    from accel_train.data.batch_shard import BatchSamplerShard
    from accel_train.data.iterable_shard import BatchWithMeta
    from accel_train.data.samplers import OrderState


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where an epoch is: the same for all ranks, and for any number of them.

    Args:
        unit: What is counted: `"samples"`, whole `"batches"` of a batch sampler, samples of a `"stream"` (or
            of a part of one, which is named), or nothing, if a `"remote"` process counts.
        consumed: How many of them all ranks together have got; of a stream, for every worker of the loader.
        next_worker: Of a stream: the worker whose turn it is.
        order: What replays the order of the epoch.
        torchdata: Of a stateful loader, where the pass began at the epoch's beginning: torchdata's state. It
            belongs to this rank.
    """

    unit: str
    consumed: tuple[int, ...] = ()
    next_worker: int = 0
    order: OrderState | None = None
    torchdata: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data without torchdata's, which `torch.load(..., weights_only=True)` reads back.

        Example:
            >>> position = Position(unit="samples", consumed=(6,))
            >>> Position.from_dict(position.to_dict()) == position
            True
        """
        return {
            "unit": self.unit,
            "consumed": list(self.consumed),
            "next_worker": self.next_worker,
            "order": self.order,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Position:
        """Read what `to_dict` wrote."""
        return cls(
            unit=data["unit"],
            consumed=tuple(data["consumed"]),
            next_worker=data["next_worker"],
            order=data["order"],
        )


StartCopy = Callable[[Any], Any]


END: Any = object()
"""Follows the last item of a pass."""


def prefetch_batches(
    batches: Iterator[Any], start_copy: StartCopy | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield every item with the one that follows, which is read already; `END` follows the last one.

    Example:
        >>> [(item, following is END) for item, following in prefetch_batches(iter("abc"))]
        [('a', False), ('b', False), ('c', True)]
    """
    if start_copy is not None:
        batches = map(start_copy, batches)
    return pairwise(chain(batches, (END,)))


def with_copies_started(
    pairs: Iterator[tuple[Any, bool]], start_copy: StartCopy | None
) -> Iterator[tuple[Any, Any]]:
    """Items with whether each is the last, as `Reading.pairs`; with `start_copy`, one is read ahead."""
    if start_copy is None:
        return ((item, END if is_last else None) for item, is_last in pairs)
    started = ((start_copy(item), END if is_last else None) for item, is_last in pairs)
    return (pair for pair, _ in prefetch_batches(started))


class Reading(ABC):
    """A pass over the data behind a loader.

    Attributes:
        batches (Iterator): The batches, or `BatchWithMeta`s, as they come.
        taken (int): How many of them the loader has yielded.
        advance (Callable | None): Counts a batch (`BatchWithMeta` or `None`) that is about to be yielded,
            where that needs more than `taken`.
    """

    batches: Iterator[Any] = iter(())
    taken: int = 0
    advance: Any = None

    def pairs(self, start_copy: StartCopy | None = None) -> Iterator[tuple[Any, Any]]:
        """Each of the batches, with what follows: `END` after the last one, else anything.

        `start_copy` is called one batch ahead.
        """
        return prefetch_batches(self.batches, start_copy)

    def opened(self) -> tuple[dict[int, int], int]:
        """Take note of the order, which is drawn for the first batch.

        Returns:
            Number of a padded batch in this pass -> how many of its samples are real, which grows; and how
            many samples the last round of all ranks has: 0 if it is complete, -1 if that is not known. By
            default nothing is known beforehand: what is padding comes with each batch.
        """
        return {}, -1

    @abstractmethod
    def position(self) -> Position:
        """Where the epoch is after the batches that were `taken`."""


class SamplerReading(Reading):
    """A pass over a map-style dataset."""

    def __init__(
        self, batches: Iterator[Any], shard: BatchSamplerShard, *, unit: str, start: int = 0, taken: int = 0
    ) -> None:
        self.batches = batches
        self.taken = taken
        self._shard = shard
        self._unit = unit
        self._stride = shard.stride
        self._start = start
        self._order: OrderState | None = None

    def opened(self) -> tuple[dict[int, int], int]:
        """Take note of the order that was drawn for the first batch."""
        self._order = self._shard.order
        return self._shard.padded, self._shard.remainder_from(self._start)

    def position(self) -> Position:
        """Where the epoch is after the batches that were `taken`."""
        consumed = self._start + self.taken * self._stride
        return Position(unit=self._unit, consumed=(consumed,), order=self._order)


class StreamReading(Reading):
    """A pass over an iterable dataset.

    Args:
        stride: How many samples of a worker's stream all ranks together get in one batch each.
        starts: How many samples of its stream every worker had given before.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        stride: int,
        starts: tuple[int, ...],
        next_worker: int = 0,
        *,
        unit: str = "stream",
    ) -> None:
        self._unit = unit
        self.batches = batches
        self._stride = stride
        self._consumed = list(starts)
        self._next_worker = next_worker

    def advance(self, loaded: BatchWithMeta | None) -> None:
        """Count a batch that was taken."""
        worker = 0 if loaded is None or loaded.worker is None else loaded.worker
        self._consumed[worker] += self._stride
        self._next_worker = (worker + 1) % len(self._consumed)

    def position(self) -> Position:
        """Where the epoch is after the batches that were `taken`."""
        return Position(unit=self._unit, consumed=tuple(self._consumed), next_worker=self._next_worker)


class FakeWorkerInfo:
    """A `worker_init_fn` that gives every worker the id of another, so that reading resumes at the right one.

    Torch's loader begins with worker 0; a pass that goes on where worker 2 had its turn calls that one 0.
    """

    def __init__(self, inner: Callable[[int], None] | None, first: int) -> None:
        self.inner = inner
        self.first = first

    def __call__(self, worker_id: int) -> None:
        """Take the other worker's number, as `get_worker_info` gives it."""
        info = get_worker_info()
        if info is not None:
            worker_id = (worker_id + self.first) % info.num_workers
            object.__setattr__(info, "id", worker_id)  # frozen against mistakes, not against need
        if self.inner is not None:
            self.inner(worker_id)
