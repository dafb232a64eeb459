"""One iteration over a loader's data: its position, and the states of torchdata's `StatefulDataLoader`."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import replace
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import chain, islice, pairwise
from typing import Any, Self, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, get_worker_info

from accel_state.errors import MissingDependencyError
from accel_state.frozen import frozen
from accel_train.data.samplers import (
    OrderState,
    is_plain_batch_sampler,
    record_source,
    restore_source,
)
from accel_train.data.shards import BatchSamplerShard, BatchWithMeta, RemainingBatches


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


class EpochPass(ABC):
    """An iteration over a loader's data.

    Attributes:
        batches (Iterator): The batches, some of them as `BatchWithMeta`.
        taken (int): The number of batches that the loader has yielded.
        advance (Callable | None): Counts a batch (`BatchWithMeta` or `None`) that is about to be yielded, if
            `taken` is not enough.
        loader (object): The loader that is iterated over.
        epoch (int): The epoch.
        facts (dict): The facts about the last batch, by the loader's attributes.
    """

    batches: Iterator[Any] = iter(())
    taken: int = 0
    advance: Any = None
    loader: object = None
    epoch: int = 0
    facts: dict[str, Any]

    def pairs(self, start_copy: StartCopy | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield each batch with the next item: `END` after the last batch, else anything.

        `start_copy` is called one batch ahead.
        """
        return prefetch_batches(self.batches, start_copy)

    def opened(self) -> tuple[dict[int, int], int]:
        """Record the order, which is drawn for the first batch.

        Returns:
            A growing map from indices of padded batches in this iteration to their numbers of real samples;
            and the number of samples in the last round of all ranks: 0 if it is complete, -1 if unknown. By
            default each batch has this information itself.
        """
        return {}, -1

    @abstractmethod
    def position(self) -> Position:
        """Return the position in the epoch after the batches that were `taken`."""


def prefetch_batches(
    batches: Iterator[Any], start_copy: StartCopy | None = None
) -> Iterator[tuple[Any, Any]]:
    """Yield every item with the next one, already read, or `END`.

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
    """Convert pairs of an item and whether it is the last to the pairs of `EpochPass.pairs`."""
    if start_copy is None:
        return ((item, END if is_last else None) for item, is_last in pairs)
    started = ((start_copy(item), END if is_last else None) for item, is_last in pairs)
    return (pair for pair, _ in prefetch_batches(started))


class SamplerReading(EpochPass):
    """An iteration over a map-style dataset."""

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
        self._order = self._shard.order
        return self._shard.padded, self._shard.remainder_from(self._start)

    def position(self) -> Position:
        consumed = self._start + self.taken * self._stride
        return Position(unit=self._unit, consumed=(consumed,), order=self._order)


class PlainReading(EpochPass):
    """An iteration over a loader that a program has assigned as `base_dataloader`.

    Args:
        loader: The loader.
        start: The number of batches to skip.
    """

    unit = "batches"

    def __init__(self, loader: Iterable[Any], start: int) -> None:
        self._start = start
        self.batches = islice(iter(loader), start, None)

    def position(self) -> Position:
        return Position(unit=self.unit, consumed=(self._start + self.taken,))


class StreamReading(EpochPass):
    """An iteration over an iterable dataset.

    Args:
        stride: The number of samples of a worker's stream in one batch of every rank.
        starts: The number of samples that each worker had yielded before.
        order: The state of the dataset's generator at the beginning of the epoch, if it has one.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        stride: int,
        starts: tuple[int, ...],
        next_worker: int = 0,
        *,
        unit: str = "stream",
        order: OrderState | None = None,
    ) -> None:
        self._unit = unit
        self.batches = batches
        self._stride = stride
        self._consumed = list(starts)
        self._next_worker = next_worker
        self._order = order or None

    def advance(self, loaded: BatchWithMeta | None) -> None:
        worker = 0 if loaded is None or loaded.worker is None else loaded.worker
        self._consumed[worker] += self._stride
        self._next_worker = (worker + 1) % len(self._consumed)

    def position(self) -> Position:
        return Position(
            unit=self._unit,
            consumed=tuple(self._consumed),
            next_worker=self._next_worker,
            order=self._order,
        )


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
"""The arguments of a torch loader that select its indices; `IndexSource.options` replaces them."""


@frozen
class IndexSource:
    """The indices that a loader reads in an epoch.

    Args:
        shard: This rank's batches of indices.
        collates: Whether a batch of indices is a batch of the loader. Otherwise (`batch_size=None`) the
            loader yields the dataset's item for each index, or for a full batch of indices.
        single: Whether the dataset is indexed with single indices, each of which yields a batch.
    """

    shard: BatchSamplerShard
    collates: bool = True
    single: bool = False

    def options(self, position: int | None = None, order: OrderState | None = None) -> dict[str, Any]:
        """Return the arguments of a torch loader that reads these indices."""
        if position is None and not self.single:
            indices: BatchSampler = self.shard
        else:
            indices = RemainingBatches(self.shard, position or 0, order, single=self.single)
        return {"batch_sampler": indices} if self.collates else {"sampler": indices, "batch_size": None}


def index_source(
    dataset: Any,
    options: dict[str, Any],
    *,
    num_processes: int = 1,
    process_index: int = 0,
    split_batches: bool = False,
    even_batches: bool = True,
    static_shapes: bool = False,
) -> IndexSource:
    """Shard the indices that a torch loader with these arguments would read."""
    batch_sampler = options.get("batch_sampler")
    # A torch loader resolves its own arguments.
    sampling = {name: options[name] for name in _SAMPLING if name in options}
    plain = DataLoader(dataset, batch_sampler=batch_sampler, **sampling)
    collates = plain.batch_sampler is not None
    batches: Any = plain.batch_sampler if collates else plain.sampler
    single = not collates and not isinstance(batches, BatchSampler)
    if isinstance(batches, RemainingBatches):
        single, batches = batches.single, batches.batch_sampler
    if isinstance(batches, BatchSamplerShard):
        if batches.num_processes > 1 or num_processes == 1:
            return IndexSource(shard=batches, collates=collates, single=single)
        batches = batches.batch_sampler
    elif single:
        if split_batches and num_processes > 1:
            raise ValueError(
                "split_batches=True cannot split the batches that a dataset makes itself (batch_size=None). "
                "Pass dispatch_batches=True, so that the main process reads and splits them."
            )
        batches = BatchSampler(cast("Any", batches), 1, drop_last=False)
    shard = BatchSamplerShard(
        batches, num_processes, process_index, split_batches, even_batches, static_shapes=static_shapes
    )
    return IndexSource(shard=shard, collates=collates, single=single)


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


class TorchLoader(DataLoader[T_co]):
    """A `DataLoader`, and also a `StatefulDataLoader` with `use_stateful_dataloader=True`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Choose the class."""
        arguments = kwargs | signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
        made = stateful_class(cls) if arguments.get("use_stateful_dataloader") else cls
        return cast("Self", object.__new__(made))


_PLAIN = "_plain_class"


@cache
def stateful_class(loader_class: type[Any]) -> type[Any]:
    """Return a class of loaders that also derives from torchdata's `StatefulDataLoader`.

    Raises:
        MissingDependencyError: torchdata is not installed.
    """
    try:
        base = import_module("torchdata.stateful_dataloader").StatefulDataLoader
    except ImportError as error:
        raise MissingDependencyError(
            "use_stateful_dataloader=True needs torchdata: pip install 'accel-train[stateful]'."
        ) from error
    if issubclass(loader_class, base):
        return loader_class
    names = {"__module__": loader_class.__module__, "__doc__": loader_class.__doc__, _PLAIN: loader_class}
    return type(loader_class.__name__, (loader_class, base), names)


def plain_class(loader_class: type[Any]) -> type[Any]:
    """Return the class extended by `stateful_class`, which pickle finds by name."""
    return vars(loader_class).get(_PLAIN, loader_class)


def remake_loader(loader_class: type[Any], stateful: bool) -> Any:
    """Create a loader without attributes, for pickle and copy."""
    return object.__new__(stateful_class(loader_class) if stateful else loader_class)


def is_stateful(dataloader: DataLoader[Any]) -> bool:
    """Return whether a loader is torchdata's `StatefulDataLoader`, without importing torchdata."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(dataloader, module.StatefulDataLoader)


AddSamplerState = Callable[[dict[str, Any], OrderState], dict[str, Any]]
"""Adds the state of torchdata's samplers to a state of its loader, as `with_sampler_state` does."""


class StatefulReading(EpochPass):
    """An iteration of torchdata's loader; its state is recorded after every batch, before the next."""

    def __init__(
        self,
        iterator: Any,
        begin: Callable[[Iterator[Any]], EpochPass],
        add_sampler_state: AddSamplerState,
    ) -> None:
        self._iterator = iterator
        self._add_sampler_state = add_sampler_state
        self._states: deque[dict[str, Any]] = deque()
        self._state: dict[str, Any] | None = None
        self._inner = begin(self._record())
        self.batches = self._inner.batches
        self.taken = self._inner.taken

    def _record(self) -> Iterator[Any]:
        for batch in self._iterator:
            self._states.append(self._iterator.state_dict())
            yield batch

    def pairs(self, start_copy: StartCopy | None = None) -> Iterator[tuple[Any, Any]]:
        return self._inner.pairs(start_copy)

    def opened(self) -> tuple[dict[int, int], int]:
        return self._inner.opened()

    def advance(self, loaded: BatchWithMeta | None) -> None:
        self._state = self._states.popleft()
        if self._inner.advance is not None:
            self._inner.advance(loaded)

    def position(self) -> Position:
        self._inner.taken = self.taken
        position = self._inner.position()
        if self._state is None:
            return position
        return replace(position, torchdata=self._add_sampler_state(self._state, position.order or {}))


_OUR_KEYS = frozenset({"format", "epoch", "position", "source", "shards"})
_FINISHED = "_iterator_finished"  # this and the keys below are from torchdata 0.8 to 0.11
_SNAPSHOT = "_snapshot"
_MAIN = "_main_snapshot"
_SAMPLER_STATE = "_sampler_iter_state"


def as_state_dict(state: dict[str, Any], *, finished: bool) -> dict[str, Any]:
    """Return torchdata's part of a state; empty if there is none.

    Example:
        >>> as_state_dict({"_num_yielded": 2, "format": 1, "position": None}, finished=True)
        {'_num_yielded': 2, '_iterator_finished': True}
    """
    own = {name: value for name, value in state.items() if name not in _OUR_KEYS}
    return own | {_FINISHED: finished} if own else {}


def is_finished(state: dict[str, Any]) -> bool:
    """Return whether a state of torchdata is from a finished iteration."""
    return bool(state.get(_FINISHED))


def batches_yielded(state: dict[str, Any]) -> int:
    """Return the number of batches that a loader of torchdata had yielded in the iteration.

    Example:
        >>> batches_yielded({"_num_yielded": 2})
        2
        >>> batches_yielded({"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 1})
        5
    """
    if _SNAPSHOT in state:
        return state[_SNAPSHOT]["_snapshot_step"] + state["_steps_since_snapshot"]
    if "_num_yielded" in state:
        return state["_num_yielded"]
    raise ValueError(
        f"This is neither an accel data loader position nor a state of torchdata's StatefulDataLoader:"
        f" it has the keys {sorted(state)!r}."
    )


def order_of(state: dict[str, Any]) -> dict[str, Any] | None:
    """Return the state that replays the order of the epoch, if torchdata's samplers have recorded it."""
    main = state[_SNAPSHOT][_MAIN] if _SNAPSHOT in state else state
    # The state of a batch sampler, or of the sampler itself with batch_size=None.
    saved = main.get(_SAMPLER_STATE) or {}
    generator = (saved.get("sampler_iter_state") or saved).get("generator")
    return {"generator": generator} if isinstance(generator, torch.Tensor) else None


def with_sampler_state(
    state: dict[str, Any], batch_sampler: Any, order: OrderState, *, single: bool
) -> dict[str, Any]:
    """Add the state of torchdata's own samplers to a state of its loader.

    A plain `StatefulDataLoader` needs it to resume from the state.

    Args:
        state: The state of a loader that reads the batches of a `BatchSamplerShard`.
        batch_sampler: The batch sampler below the shard, not sharded across ranks.
        order: The state that replays the order of the epoch.
        single: Whether the loader yields single samples, not batches.
    """
    torchdata: Any = import_module("torchdata.stateful_dataloader.sampler")
    if not is_plain_batch_sampler(batch_sampler) and type(batch_sampler) is not torchdata.BatchSampler:
        return state
    main = state[_SNAPSHOT][_MAIN] if _SNAPSHOT in state else state
    sampler: Any = batch_sampler.sampler
    samples = main["_sampler_iter_yielded"] * batch_sampler.batch_size
    if isinstance(sampler, Sized):
        samples = min(samples, len(sampler))
    is_shuffled = "generator" in order and type(sampler) in {RandomSampler, torchdata.RandomSampler}
    shuffled = {"yielded": samples, "generator": order["generator"]} if is_shuffled else None
    if single:
        main = {**main, _SAMPLER_STATE: shuffled}
    else:
        iterated: dict[str, Any] = {} if shuffled is None else {"sampler_iter_state": shuffled}
        if type(sampler) is torchdata.StatefulDistributedSampler:
            iterated["sampler_state"] = {"yielded": samples}
        main = {**main, _SAMPLER_STATE: {"samples_yielded": samples, **iterated}}
    return {**state, _SNAPSHOT: {**state[_SNAPSHOT], _MAIN: main}} if _SNAPSHOT in state else main


def state_before_first_pass(
    loader: Any, ask: Callable[[], dict[str, Any]], add_sampler_state: AddSamplerState
) -> dict[str, Any]:
    """Return torchdata's state of a loader before its first iteration, without drawing random numbers.

    torchdata begins an iteration for this, which is dropped: it would not see an epoch that is set later.
    """
    sampler = loader.order_source
    source = record_source(sampler)
    attributes: dict[str, Any] = getattr(sampler, "__dict__", {})
    before = dict(attributes)
    generator, loader.generator = loader.generator, torch.Generator()
    try:
        with torch.random.fork_rng(devices=[]):
            state = ask()
    finally:
        loader.generator = generator
        restore_source(sampler, source)
        attributes.update(before)  # workers have prefetched, and may have ended an epoch
        vars(loader).update(_iterator=None, _initial_iter_for_state_dict=False)
    return as_state_dict(add_sampler_state(state, source), finished=False)
