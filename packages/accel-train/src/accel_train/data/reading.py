"""One iteration over a loader's data: its position, and the states of torchdata's `StatefulDataLoader`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain, pairwise
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, get_worker_info

from accel_state.errors import MissingDependencyError
from accel_state.frozen import frozen
from accel_train.data.samplers import OrderState
from accel_train.data.shards import BatchSamplerShard, BatchWithMeta


@frozen
class Position:
    """A position in an epoch: the same for all ranks, and valid for any number of ranks.

    Args:
        unit: The unit of `consumed`: `"samples"`, full `"batches"` of a batch sampler, samples of a
            `"stream"` (or of a named part of one), or `"remote"`, if another process counts.
        consumed: The number of units that all ranks together have consumed; in a stream, one number per
            worker.
        next_worker: In a stream, the worker that yields the next batch.
        order: The state that replays the order of the epoch.
        torchdata: The state of torchdata's loader on this rank, if iteration began at the epoch's beginning.
    """

    unit: str
    consumed: tuple[int, ...] = ()
    next_worker: int = 0
    order: OrderState | None = None
    torchdata: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without torchdata's state, that `torch.load(..., weights_only=True)` reads.

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
        """Build a position from the result of `to_dict`."""
        return cls(
            unit=data["unit"],
            consumed=tuple(data["consumed"]),
            next_worker=data["next_worker"],
            order=data["order"],
        )


StartCopy = Callable[[Any], Any]
"""Starts the copy of a batch to the device."""
END: Any = object()
"""The item after the last one of an iteration."""


class Pass:
    """An iteration over a loader's data.

    Args:
        batches: The batches, some of them as `BatchWithMeta`.
        start: The position from which batches are counted.
        stride: The change of the position by one batch.
        shard: The indices of a map-style dataset.
        taken: The number of batches after `start` that were yielded before.

    Attributes:
        loader (object): The loader that is iterated over.
        epoch (int): The epoch.
        facts (dict): The facts about the last batch, by the loader's attributes.
    """

    loader: object = None
    epoch: int = 0

    def __init__(
        self,
        batches: Iterator[Any],
        start: Position,
        stride: int = 0,
        shard: BatchSamplerShard | None = None,
        taken: int = 0,
    ) -> None:
        self.batches = batches
        self.start = start
        self.shard = shard
        self.taken = taken
        self.facts: dict[str, Any] = {}
        self._stride = stride
        self._by_worker = [0] * len(start.consumed)
        self._next_worker = start.next_worker
        self._torchdata: dict[str, Any] | None = None

    def record_order(self) -> None:
        """Record the order of indices, which is drawn for the first batch."""
        if self.shard is not None:
            self.start = replace(self.start, order=self.shard.order)
            self.shard.start, self.shard.replays = 0, None

    def count(self, loaded: BatchWithMeta) -> None:
        """Count a batch that is about to be yielded; one without metadata counts as `taken` only."""
        self.taken += loaded.read
        self._torchdata = loaded.torchdata
        for worker in loaded.workers:
            self._by_worker[worker] += 1
            self._next_worker = (worker + 1) % len(self._by_worker)

    def position(self) -> Position:
        """Return the position in the epoch after the batches that were counted."""
        counts = self._by_worker if len(self._by_worker) > 1 else [self.taken] * len(self._by_worker)
        consumed = zip(self.start.consumed, counts, strict=True)
        return replace(
            self.start,
            consumed=tuple(before + count * self._stride for before, count in consumed),
            next_worker=self._next_worker,
            torchdata=self._torchdata,
        )


def prefetch_batches(batches: Iterator[Any], start_copy: StartCopy | None) -> Iterator[tuple[Any, Any]]:
    """Yield every item with the next one, already read, or `END`; copies start as items are read.

    Example:
        >>> [(item, following is END) for item, following in prefetch_batches(iter("abc"), None)]
        [('a', False), ('b', False), ('c', True)]
    """
    if start_copy is not None:
        batches = map(partial(on_batch, start_copy), batches)
    return pairwise(chain(batches, (END,)))


def on_batch(function: Callable[[Any], Any], item: Any) -> Any:
    """Replace the batch in an item, itself a batch or a `BatchWithMeta`, with a function's result."""
    return replace(item, batch=function(item.batch)) if type(item) is BatchWithMeta else function(item)


class RotatedWorkerIds:
    """A `worker_init_fn` that rotates the ids of workers, so that reading resumes at the right worker.

    Torch's loader begins with worker 0; to resume at worker 2, its worker 0 gets the id 2.
    """

    def __init__(self, inner: Callable[[int], None] | None, first: int) -> None:
        self.inner = inner
        self.first = first

    def __call__(self, worker_id: int) -> None:
        """Set the id that `get_worker_info` returns."""
        info = get_worker_info()
        if info is not None:
            worker_id = (worker_id + self.first) % info.num_workers
            object.__setattr__(info, "id", worker_id)  # WorkerInfo is frozen
        if self.inner is not None:
            self.inner(worker_id)


class WorkersEpoch:
    """A `worker_init_fn` through which an iterable dataset in persistent workers follows `set_epoch`.

    Each worker has a copy of the dataset, which begins every iteration with the epoch set last.
    """

    def __init__(self, inner: Callable[[int], None] | None) -> None:
        self.inner = inner
        self._epoch = torch.tensor(-1, device="cpu")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration of the workers, also of those started later."""
        self._epoch.share_memory_().fill_(epoch)  # a copied tensor is not shared any more

    def __call__(self, worker_id: int) -> None:
        """Replace the class of this worker's dataset with one that sets the epoch before it iterates."""
        if self.inner is not None:
            self.inner(worker_id)
        info, shared = get_worker_info(), self._epoch
        if info is None:
            return
        dataset: Any = info.dataset
        kind: Any = getattr(type(dataset), "_iterates", type(dataset))

        def iterate(dataset: Any) -> Iterator[Any]:
            if shared >= 0:
                dataset.set_epoch(int(shared))
            return kind.__iter__(dataset)

        dataset.__class__ = type(kind.__name__, (kind,), {"__iter__": iterate, "_iterates": kind})


_SAMPLING = ("batch_size", "shuffle", "sampler", "drop_last", "generator")
INDEXING = frozenset({"batch_size", "shuffle", "sampler", "drop_last", "batch_sampler"})
"""The arguments of a torch loader that select its indices; `shard_indices` replaces them."""


def shard_indices(
    dataset: Any,
    options: dict[str, Any],
    *,
    num_processes: int = 1,
    process_index: int = 0,
    split_batches: bool = False,
    even_batches: bool = True,
    static_shapes: bool = False,
) -> dict[str, Any]:
    """Shard the indices that a torch loader with these arguments would read.

    Returns:
        The arguments of a torch loader that reads this rank's indices: a `BatchSamplerShard` as its
        `batch_sampler`, or with `batch_size=None` as its `sampler`: the loader then yields the dataset's item
        for each index, or for a full batch of indices.
    """
    batch_sampler = options.get("batch_sampler")
    # A torch loader resolves its own arguments.
    sampling = {name: options[name] for name in _SAMPLING if name in options}
    plain = DataLoader(dataset, batch_sampler=batch_sampler, **sampling)
    collates = plain.batch_sampler is not None
    shard: Any = plain.batch_sampler if collates else plain.sampler
    single = not collates and not isinstance(shard, BatchSampler)
    if isinstance(shard, BatchSamplerShard) and shard.num_processes == 1 < num_processes:
        single, shard = shard.single, shard.batch_sampler
    elif single:
        if split_batches and num_processes > 1:
            raise ValueError(
                "split_batches=True cannot split the batches that a dataset makes itself (batch_size=None). "
                "Pass dispatch_batches=True, so that the main process reads and splits them."
            )
        shard = BatchSampler(cast("Any", shard), 1, drop_last=False)
    if not isinstance(shard, BatchSamplerShard):
        shard = BatchSamplerShard(
            *(shard, num_processes, process_index, split_batches, even_batches),
            static_shapes=static_shapes,
            single=single,
        )
    return {"batch_sampler": shard} if collates else {"sampler": shard, "batch_size": None}


_COPIED_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)


def loader_options(dataloader: DataLoader[Any]) -> dict[str, Any]:
    """Return the arguments to rebuild a torch loader, its dataset included."""
    options = {name: getattr(dataloader, name) for name in _COPIED_OPTIONS}
    if dataloader.pin_memory_device:
        options["pin_memory_device"] = dataloader.pin_memory_device
    if is_stateful(dataloader):
        options["snapshot_every_n_steps"] = cast("Any", dataloader).snapshot_every_n_steps
    if isinstance(dataloader.dataset, IterableDataset):
        return {**options, "batch_size": dataloader.batch_size, "drop_last": dataloader.drop_last}
    if dataloader.batch_sampler is None:
        return {**options, "batch_size": None, "sampler": dataloader.sampler}
    return {**options, "batch_sampler": dataloader.batch_sampler}


T_co = TypeVar("T_co", covariant=True)


def stateful_loader_class() -> Any:
    """Return torchdata's `StatefulDataLoader`.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    try:
        return import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        raise MissingDependencyError(
            "use_stateful_dataloader=True needs torchdata: pip install 'accel-train[stateful]'."
        ) from error


def with_states(iterator: Any) -> Iterator[BatchWithMeta]:
    """Yield the batches of a `StatefulDataLoader`, each with the loader's state after it."""
    for item in iterator:
        loaded = item if type(item) is BatchWithMeta else BatchWithMeta(item)
        loaded.torchdata = iterator.state_dict()
        yield loaded


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader is torchdata's `StatefulDataLoader`, without importing torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(dataloader, module.StatefulDataLoader)


def batches_yielded(state: dict[str, Any]) -> int:
    """Return the number of batches that a loader of torchdata had yielded in the iteration.

    Example:
        >>> batches_yielded({"_num_yielded": 2})
        2
        >>> batches_yielded({"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 1})
        5
    """
    if "_snapshot" in state:
        return state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
    if "_num_yielded" in state:
        return state["_num_yielded"]
    raise ValueError(
        f"This is neither an accel data loader position nor a state of torchdata's StatefulDataLoader:"
        f" it has the keys {sorted(state)!r}."
    )
