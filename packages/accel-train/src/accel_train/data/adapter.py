"""Base of prepared loaders: a torch `DataLoader` that saves and resumes its position."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Self, SupportsIndex, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert

from accel_ops.tree import ignorant_find_batch_size
from accel_state.accelerator_state import GradientState
from accel_train.data.reading import (
    END,
    INDEXING,
    EpochPass,
    IndexSource,
    PlainReading,
    Position,
    RotatedWorkerIds,
    SamplerReading,
    StartCopy,
    StatefulReading,
    StreamReading,
    T_co,
    TorchLoader,
    WorkersEpoch,
    as_state_dict,
    batches_yielded,
    index_source,
    is_finished,
    order_of,
    plain_class,
    remake_loader,
    state_before_first_pass,
    with_sampler_state,
)
from accel_train.data.samplers import (
    OrderState,
    innermost_sampler,
    record_source,
    replace_sampler,
    restore_source,
)
from accel_train.data.shards import (
    BatchSamplerShard,
    BatchWithMeta,
    IterableDatasetShard,
    MetaCollate,
    set_epoch_of,
)

if TYPE_CHECKING:
    from accel_plugins.strategy import Replicas
    from accel_train.checkpoint.preemption import Preemption
    from accel_train.data.loader import BatchTransfer
    from accel_train.profiling import StepMeter


logger = logging.getLogger(__name__)
STATE_FORMAT = 1


@dataclass(slots=True)
class LoaderProgress:
    """The progress of a loader, shared with the loaders that `skipping` returns.

    `passes` are the open iterations; the last one has yielded last.
    """

    epoch: int = 0
    passes: list[EpochPass] = field(default_factory=list["EpochPass"])
    finished: dict[str, Any] | None = None


_STATEFUL_OPTIONS = ("snapshot_every_n_steps",)


class DataLoaderAdapter(TorchLoader[T_co]):
    """A `torch.utils.data.DataLoader` that saves and resumes its position in the epoch.

    Args:
        dataset: The dataset to load.
        use_stateful_dataloader: Whether to also be torchdata's `StatefulDataLoader`, which saves the state of
            stateful datasets.
        batch_sampler: Yields batches of indices.
        **kwargs: As for `torch.utils.data.DataLoader`.

    Raises:
        MissingDependencyError: torchdata is requested and not installed.
    """

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        special = {name: kwargs.pop(name) for name in _STATEFUL_OPTIONS if name in kwargs}
        options = kwargs if batch_sampler is None else {**kwargs, "batch_sampler": batch_sampler}
        self._indices: IndexSource | None = None
        if isinstance(dataset, IterableDataset):
            options = _with_meta_collate(dataset, options)
        else:
            self._indices = index_source(dataset, options)
            options = {name: value for name, value in options.items() if name not in INDEXING}
            options |= self._indices.options()
        super().__init__(dataset, **options, **(special if use_stateful_dataloader else {}))
        self._options = {name: value for name, value in options.items() if name not in INDEXING}
        self.use_stateful_dataloader = use_stateful_dataloader
        self.dataset_parts = 1  # number of ranks with different data, if not sharded by our samplers
        self.skip_batches = 0
        self._drop_last = False
        self._batches_per_step = 1  # batches of the dataset per batch on every rank
        self._reads = True
        self._has_drawn = False
        self._resume: Position | None = None
        self._resume_epoch: int | None = None
        self._progress = LoaderProgress()
        self._base: Any = None
        self._workers_epoch: WorkersEpoch | None = None
        follows = isinstance(dataset, IterableDataset) and hasattr(dataset, "set_epoch")
        if follows and self.persistent_workers and not isinstance(dataset, IterableDatasetShard):
            self._workers_epoch = WorkersEpoch(self.worker_init_fn)
            self.worker_init_fn = self._options["worker_init_fn"] = self._workers_epoch

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy or pickle the loader without its current iteration: the copy begins a new one."""
        progress = LoaderProgress(epoch=self.iteration, finished=self._progress.finished)
        # Persistent workers belong to this loader.
        state = {**vars(self), "_progress": progress, "_iterator": None}
        return remake_loader, (plain_class(type(self)), self.use_stateful_dataloader), state

    @property
    def base_dataloader(self) -> Iterable[Any]:
        """The loader that reads the data: this one, unless a program has assigned another.

        An assigned loader's batches are yielded unchanged: they are not sharded, and the position is the
        number of batches.
        """
        return self if self._base is None else self._base

    @base_dataloader.setter
    def base_dataloader(self, loader: Iterable[Any]) -> None:
        self._base = None if loader is self else loader

    @property
    def iteration(self) -> int:
        """The epoch of the current iteration, or of the next one."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.epoch = epoch

    def __len__(self) -> int:
        """Number of batches of this rank, without those that the next iteration skips."""
        if self._base is not None:
            return max(0, len(self._base) - self.skip_batches)
        full_steps, remaining = divmod(super().__len__(), self._batches_per_step)
        return max(0, full_steps + (remaining > 0 and not self._drop_last) - self.skip_batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, for the samplers and the dataset.

        A loaded position in another epoch is dropped.

        Args:
            epoch: Counted from 0. Without a call, loaders count their iterations.
        """
        if self._resume is not None and self._resume_epoch not in {None, epoch}:
            logger.warning(
                "set_epoch(%d) drops the loaded position in epoch %d: epoch %d will be complete.",
                epoch,
                self._resume_epoch,
                epoch,
            )
            self._resume = None
        self.iteration = epoch
        part: Any = self.batch_sampler if self.batch_sampler is not None else self.sampler
        while part is not None:
            set_epoch_of(part, epoch)
            part = getattr(part, "batch_sampler", getattr(part, "sampler", None))
        set_epoch_of(self.dataset, epoch)
        if self._workers_epoch is not None:
            self._workers_epoch.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and during an iteration the data consumed, up to the last batch.

        The position is valid for all ranks, and for any number of ranks.

        Returns:
            Plain data, which `torch.load(..., weights_only=True)` reads. With `use_stateful_dataloader` it is
            torchdata's state together with the position; an iteration that began in the middle of an epoch,
            by skipping or with another number of ranks, has no torchdata state.
        """
        position = self._position()
        state: dict[str, Any] = {
            "format": STATE_FORMAT,
            "epoch": passes[-1].epoch if (passes := self._progress.passes) else self.iteration,
            "position": None if position is None else position.to_dict(),
            "source": record_source(self.order_source),
        }
        if not self.use_stateful_dataloader:
            return state
        return {**self.torchdata_state(), **state, "shards": self._shards}

    def torchdata_state(self) -> dict[str, Any]:
        """Return torchdata's part of the state, for any `StatefulDataLoader`; empty if there is none."""
        position = self._position()
        if position is not None:
            ended = bool(self._progress.passes) and bool(getattr(self, "end_of_dataloader", False))
            return as_state_dict(position.torchdata or {}, finished=ended)
        if self._progress.finished is not None:
            return as_state_dict(self._progress.finished, finished=True)
        if not self._reads:
            return {}
        return state_before_first_pass(self, super().state_dict, self._add_sampler_state)  # type: ignore[misc]

    def _add_sampler_state(self, state: dict[str, Any], order: OrderState) -> dict[str, Any]:
        if self._indices is None or self._shards > 1:
            return state
        return with_sampler_state(
            state, self._indices.shard.batch_sampler, order, single=self._indices.single
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a position in the next iteration.

        Args:
            state_dict: A result of `state_dict`, from a run with any number of processes, or the state of a
                `StatefulDataLoader`.

        Raises:
            ValueError: The position belongs to another kind of loader.
        """
        if "format" not in state_dict and self.use_stateful_dataloader:
            self._resume, self._resume_epoch = self._position_in(state_dict), None
            return
        if state_dict.get("format") != STATE_FORMAT:
            raise ValueError(
                f"This version of accel cannot read this data loader position: it has the keys "
                f"{sorted(state_dict)!r} and format={state_dict.get('format')!r}, not {STATE_FORMAT}."
            )
        position = state_dict["position"]
        self._resume = None if position is None else self._checked(Position.from_dict(position))
        self._resume_epoch = self.iteration = state_dict["epoch"]
        if self._resume is not None and state_dict.get("shards") == self._shards:
            self._resume = replace(self._resume, torchdata=as_state_dict(state_dict, finished=False) or None)
        restore_source(self.order_source, state_dict.get("source", {}))
        self._has_drawn = position is not None or self.iteration > 0

    def load_epoch(self, state_dict: dict[str, Any]) -> None:
        """Restart the epoch of a position in the next iteration, in the same order.

        Args:
            state_dict: A result of `state_dict`, also of a loader with another number of workers.
        """
        position = state_dict["position"]
        if position is not None and self._reads:
            start = {"consumed": [0] * self._readers, "next_worker": 0}
            position = {**position, **start} if position["unit"] == self._unit else None
        self.load_state_dict({**state_dict, "position": position, "shards": None})

    def _position_in(self, state: dict[str, Any]) -> Position | None:
        """Return the position in a state of torchdata, for the same numbers of ranks and workers."""
        if is_finished(state):
            return None
        batches, workers = batches_yielded(state), self._readers
        return Position(
            unit=self._unit,
            consumed=tuple(
                self._inner_stride * (batches // workers + (worker < batches % workers))
                for worker in range(workers)
            ),
            next_worker=batches % workers,
            order=order_of(state),
            torchdata=state,
        )

    def wrap_worker_init(self, wrap: Callable[[Any], Callable[[int], None]]) -> None:
        """Replace `worker_init_fn` with the result of a function of it."""
        self.worker_init_fn = self._options["worker_init_fn"] = wrap(self.worker_init_fn)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: `state_dict` returns the position of the last yielded batch, not of prefetched ones.

        Loaders of other libraries that count prefetched batches may override this.
        """

    def _checked(self, position: Position) -> Position:
        if not self._reads:
            return position
        unit, workers = self._unit, self._readers
        if position.unit == "remote":
            raise ValueError(
                "The saved data position is from a process that received its batches. Load the position "
                "saved by the main process."
            )
        if position.unit != unit:
            raise ValueError(
                f"The saved data position counts {position.unit!r}, but this loader counts {unit!r}. "
                "Build the loader as in the saved run."
            )
        if self._base is None and self._indices is None and len(position.consumed) != workers:
            raise ValueError(
                f"The saved data position is for {len(position.consumed)} worker(s), each with a part of "
                f"the iterable dataset, but this loader has {workers}. Pass "
                f"num_workers={len(position.consumed)!r} as in the saved run."
            )
        return position

    def _position(self) -> Position | None:
        """Return the position of the current iteration, or the one at which the next resumes, if any."""
        passes = self._progress.passes
        return passes[-1].position() if passes else self._resume

    @property
    def _readers(self) -> int:
        """The number of workers that count batches separately: all for an iterable dataset; else 1."""
        return 1 if self._indices is not None else max(1, self.num_workers)

    @property
    def _unit(self) -> str:
        if self._base is not None:
            return PlainReading.unit
        unit = "stream" if self._indices is None else self._indices.shard.unit
        return unit if self.dataset_parts == 1 else f"{unit}, 1 of {self.dataset_parts} parts"

    @property
    def stride(self) -> int:
        """The change of the position by one batch on every rank."""
        return self._inner_stride * self._batches_per_step

    @property
    def counts_samples(self) -> bool:
        """Whether `stride` is a number of samples; else of batches, whose sizes are not known in advance."""
        return self.batch_size is not None if self._indices is None else self._indices.shard.counts_samples

    @property
    def _inner_stride(self) -> int:
        if self._indices is not None:
            return self._indices.shard.stride
        dataset: Any = self.dataset
        return dataset.plan.stride if isinstance(dataset, IterableDatasetShard) else self.batch_size or 1

    @property
    def sharder(self) -> Any | None:
        """The object that shards this loader's data and has `even_batches`; `None` if there is none."""
        if self.dataset_parts > 1:
            return None
        if self._indices is not None:
            return self._indices.shard
        return self.dataset if isinstance(self.dataset, IterableDatasetShard) else None

    @property
    def order_source(self) -> object:
        """The object whose generator determines the order: the innermost sampler, or the iterable dataset."""
        if self._indices is not None:
            return innermost_sampler(self._indices.shard)
        dataset: Any = self.dataset
        return dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset

    @property
    def is_sharded(self) -> bool:
        """Whether this rank reads only a part of the data."""
        return self._shards > 1 or self.dataset_parts > 1

    @property
    def _shards(self) -> int:
        part = self.dataset if self._indices is None else self._indices.shard
        return part.num_processes if isinstance(part, (IterableDatasetShard, BatchSamplerShard)) else 1

    def _open(self) -> EpochPass:
        """Begin the next iteration: at a loaded position, after `skip_batches`, or at the beginning."""
        return self._begin_reading()

    def _begin_reading(self) -> EpochPass:
        position, self._resume = self._resume, None
        skip, self.skip_batches = self.skip_batches, 0
        if self._base is not None:
            return PlainReading(self._base, skip if position is None else position.consumed[0])
        resumed = position is not None
        # The number of samples of a worker's stream is known only by reading; torchdata counts by itself.
        seeks = self._indices is not None or (not self.use_stateful_dataloader and self.num_workers == 0)
        if skip and seeks and (position is None or position.torchdata is None):
            position = position or Position(unit=self._unit, consumed=(0,))
            position = replace(position, consumed=(position.consumed[0] + skip * self.stride,))
            skip = 0
        reading = self._read() if position is None else self._read_from(position, resumed=resumed)
        for item in islice(reading.batches, skip * self._batches_per_step):
            if reading.advance is not None:
                reading.advance(item if type(item) is BatchWithMeta else None)
        return reading

    def _read(self, position: Position | None = None) -> EpochPass:
        """Begin an iteration of torch's loader: at the epoch's beginning, or at torchdata's position."""
        begin: Callable[[Iterator[Any]], EpochPass]
        if self._indices is not None:
            taken = 0 if position is None else position.consumed[0] // self._inner_stride
            begin = partial(SamplerReading, shard=self._indices.shard, taken=taken, unit=self._unit)
        else:
            starts = (0,) * self._readers if position is None else position.consumed
            worker = 0 if position is None else position.next_worker
            order = self._stream_order(position)
            begin = partial(StreamReading, stride=self._inner_stride, starts=starts, next_worker=worker)
            begin = partial(begin, unit=self._unit, order=order)
        batches = self._torch_batches()
        if position is not None:  # torchdata counts twice the batches it reads to reach its position
            vars(batches)["_num_yielded"] = batches_yielded(position.torchdata or {})
        if self.use_stateful_dataloader:
            return StatefulReading(batches, begin, self._add_sampler_state)
        return begin(batches)

    def _torch_batches(self) -> Iterator[Any]:
        """Begin an iteration of torch's loader."""
        if not (self._has_drawn and self.persistent_workers):
            return super().__iter__()
        # Persistent workers got their seed at the beginning of the resumed run.
        self._has_drawn = False
        with self._throwaway_generator():
            return super().__iter__()

    @contextmanager
    def _throwaway_generator(self) -> Generator[None]:
        """Give torch's loader a copy of its generator for its worker seed, so that nothing is drawn."""
        generator, self.generator = self.generator, _copied(self.generator)
        try:
            yield
        finally:
            self.generator = generator

    def _read_from(self, position: Position, *, resumed: bool) -> EpochPass:
        """Begin an iteration in the middle of an epoch, through a temporary loader."""
        if position.torchdata is not None:
            if self._indices is not None:
                self._indices.shard.replays = position.order
            super().load_state_dict(position.torchdata)  # type: ignore[misc]
            with self._throwaway_generator():  # the seed was drawn when the pass began
                return self._read(position)
        options: dict[str, Any] = {**self._options, "persistent_workers": False}
        if resumed:  # the seed of the workers was drawn when the epoch began
            options["generator"] = _copied(self.generator)
        if self._indices is not None:
            (start,) = position.consumed
            options |= self._indices.options(start, position.order)
            batches = iter(DataLoader(self.dataset, **options))
            return SamplerReading(batches, self._indices.shard, start=start, unit=self._unit)
        options |= {"batch_size": self.batch_size, "drop_last": self.drop_last}
        options["worker_init_fn"] = RotatedWorkerIds(self.worker_init_fn, position.next_worker)
        dataset, starts = cast("Any", self.dataset), position.consumed
        order = self._stream_order(position)
        stream = (
            dataset.starting_at(starts)
            if isinstance(dataset, IterableDatasetShard)
            else IterableDatasetShard(dataset, self._inner_stride, starts=starts)
        )
        batches = iter(DataLoader(stream, **options))
        return StreamReading(
            batches, self._inner_stride, starts, position.next_worker, unit=self._unit, order=order
        )

    def _stream_order(self, position: Position | None) -> OrderState:
        """Return the state that replays a stream's order, after setting it if a position has one."""
        if position is not None and position.order:
            restore_source(self.order_source, position.order)
            return position.order
        dataset: Any = self.dataset
        if isinstance(dataset, IterableDatasetShard):
            dataset.seed_with_epoch()
        return record_source(self.order_source)


def _copied(generator: torch.Generator | None) -> torch.Generator:
    """Copy a generator; torch's default one if `None`."""
    state = torch.get_rng_state() if generator is None else generator.get_state()
    return torch.Generator().set_state(state)


def _with_meta_collate(dataset: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a torch loader of an iterable dataset, with a `MetaCollate` if needed."""
    if not options.get("num_workers") and not getattr(dataset, "mark_padding", False):
        return options
    batched = options.get("batch_size", 1) is not None
    collate = options.get("collate_fn") or (default_collate if batched else default_convert)
    return {**options, "collate_fn": MetaCollate(collate, batched=batched)}


class DataLoaderStateMixin:
    """Facts about the last batch that a loader yielded, for the gradient state and others.

    Args:
        *args: For the next class.
        **kwargs: For the next class.

    Attributes:
        end_of_dataloader (bool): Whether the batch is the last one.
        remainder (int): The number of samples in the last batches of all ranks together if they are
            incomplete, 0 if they are complete, -1 while unknown.
        real_in_batch (int | None): The number of samples at the beginning of the batch that are not padding;
            all if `None`.
    """

    end_of_dataloader: bool = False
    remainder: int = -1
    real_in_batch: int | None = None
    _batch: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradient_state = GradientState()

    @property
    def batch_size_seen(self) -> int | None:
        """Number of samples in the batch, padding included; `None` if it has no tensors."""
        return ignorant_find_batch_size(self._batch)

    def reset(self) -> None:
        """Reset the facts to their state before an iteration."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_in_batch = None
        self._batch = None

    def begin(self) -> None:
        """Begin an iteration: the loader becomes the active one."""
        self.reset()
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End an iteration, complete or not: the previously active loader becomes active again."""
        self._batch = None
        self.gradient_state._remove_dataloader(self)


class PreparedLoader(DataLoaderStateMixin, DataLoaderAdapter[T_co]):
    """Base of `DataLoaderShard`, `DataLoaderDispatcher` and `SkipDataLoader`.

    For type checkers, it yields the annotated type of torch's `DataLoader`.

    Attributes:
        shard_sequences (Callable | None): Shards the sequences of a batch; they stay full if `None`.
        meter (StepMeter | None): Measures the time that the loop waits for each batch.
        preemption (Preemption | None): Detects when a step ends.
        replicas (Replicas | None): Sets the position after a replica group was healed.
        resume_mid_epoch (bool): Whether `load_state` resumes it at the next batch, stateful or not.
    """

    shard_sequences: Callable[[Any], Any] | None = None
    meter: StepMeter | None = None
    preemption: Preemption | None = None
    replicas: Replicas | None = None
    resume_mid_epoch: bool = False

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[T_co]: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        dataset: Any,
        *,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        _drop_last: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches
        self.torch_device_mesh = torch_device_mesh
        self.iteration = iteration
        self._drop_last = _drop_last

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Copy or pickle the loader without the facts about an iteration, and without its observers."""
        make, arguments, state = super().__reduce_ex__(protocol)
        facts = {"end_of_dataloader": False, "remainder": -1, "real_in_batch": None, "_batch": None}
        return make, arguments, state | facts | {"meter": None, "preemption": None, "replicas": None}

    @property
    def batch_size_seen(self) -> int | None:
        """Number of samples in the batch, padding included; `None` if it is not known."""
        if self.real_in_batch is not None and (rows := self._rows_of_padded()) is not None:
            return rows
        return super().batch_size_seen

    def _rows_of_padded(self) -> int | None:
        """Return the size of padded batches, as known by the sharder."""
        if self._indices is not None:
            return self._indices.shard.padded_rows or None
        if isinstance(self.dataset, IterableDatasetShard) and self.batch_size is not None:
            return self.dataset.plan.rows
        return None

    @property
    def total_batch_size(self) -> int:
        """Number of samples in the batches of all ranks together."""
        return self.stride * self.dataset_parts

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset, over all ranks."""
        dataset: Any = self.dataset
        return len(dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset)

    def get_sampler(self) -> Any:
        """Return the sampler of indices, below all batch samplers."""
        return innermost_sampler(self.sampler if self.batch_sampler is None else self.batch_sampler)

    def set_sampler(self, sampler: Any) -> None:
        """Replace the sampler of indices.

        Args:
            sampler: Another sampler over the same dataset.

        Raises:
            ValueError: The loader has a custom batch sampler, without a sampler below.
        """
        replace_sampler(self.sampler if self.batch_sampler is None else self.batch_sampler, sampler)

    def skipping(self, batches: int) -> Self:
        """Return a copy of this loader whose next iteration begins later in the epoch.

        The two share their progress: epochs and positions.
        """
        skipped = copy(self)
        skipped._progress, skipped.meter = self._progress, self.meter
        skipped.preemption, skipped.replicas = self.preemption, self.replicas
        skipped.skip_batches = self.skip_batches + batches
        position, self._resume, skipped._resume = self._resume, None, None
        # Batches count from the beginning of the epoch, in the order of a loaded position.
        if position is not None and position.order is not None and self._base is None:
            start = (0,) * len(position.consumed)
            skipped._resume = replace(position, consumed=start, next_worker=0, torchdata=None)
        return skipped

    def _pass(
        self, batch_transfer: BatchTransfer | None = None, *, before: Callable[[], None] | None = None
    ) -> Generator[Any]:
        """Yield the batches of one iteration."""
        begin = partial(self._batches, batch_transfer, before)
        batches = begin() if self.replicas is None else self.replicas.watched(self, begin)
        if self.meter is not None:
            batches = self.meter.timed(self, batches)
        return batches if self.preemption is None else self.preemption.watched(batches)

    def _batches(
        self, batch_transfer: BatchTransfer | None, before: Callable[[], None] | None
    ) -> Generator[Any]:
        # 1. Begin the iteration.
        if before is not None:
            before()
        epoch = self.iteration
        self.set_epoch(epoch)
        self.begin()
        passes, state = self._progress.passes, self.gradient_state
        facts = vars(self)  # torch's loaders have a slow `__setattr__`
        reading: EpochPass | None = None
        try:
            reading = self._open()
            reading.loader, reading.epoch, reading.facts = self, epoch, {}
            passes.append(reading)
            advance, padded, remainder = reading.advance, None, -1
            start_copy = None if batch_transfer is None else batch_transfer.start_copy
            finish_copy = None if batch_transfer is None else batch_transfer.finish_copy
            if self.shard_sequences is not None:
                start_copy = _sharding_first(self.shard_sequences, start_copy)
            # 2. Yield each batch, with the facts about it.
            for item, following in reading.pairs(start_copy):
                if padded is None:  # the first batch has drawn the order
                    padded, remainder = reading.opened()
                    remainder = remainder if self.dataset_parts == 1 else -1
                loaded = item if type(item) is BatchWithMeta else None
                batch = item if loaded is None else loaded.batch
                real = padded.get(reading.taken) if padded else None
                reading.taken += 1
                if advance is not None:
                    advance(loaded)
                    if not padded:
                        real = None if loaded is None else loaded.real
                if finish_copy is not None:
                    batch = finish_copy(batch)
                reading.facts = {
                    "end_of_dataloader": following is END,
                    "remainder": remainder,
                    "real_in_batch": real,
                    "_batch": batch,
                }
                facts.update(reading.facts)
                if following is END:
                    self._set_remainder(loaded)
                    reading.facts["remainder"] = self.remainder
                active = state._loaders
                if passes[-1] is not reading or not active or active[-1]() is not self:
                    self._activate(reading)
                yield batch
        finally:
            # 3. End the iteration, and the epoch unless the loop has set another one.
            self.end()
            if reading is not None:
                self._close(reading)
            if self.iteration == epoch:
                self.iteration = epoch + 1

    def _close(self, reading: EpochPass, is_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        """Remove an iteration; an outer one over this loader has its facts again."""
        passes = self._progress.passes
        if reading in passes:
            passes.remove(reading)
            # At the interpreter's exit, the names that `position` uses are gone.
            if self.use_stateful_dataloader and not passes and not is_exit():
                self._progress.finished = reading.position().torchdata
        for outer in passes:
            if outer.loader is self:
                vars(self).update(outer.facts)

    def _activate(self, reading: EpochPass) -> None:
        """Make an iteration the current one again; drop later ones that were left at their last batch."""
        passes = self._progress.passes
        passes.remove(reading)
        passes.append(reading)
        loaders = self.gradient_state.dataloader_references[1:]
        below = max((index for index, loader in enumerate(loaders) if loader is self), default=0)
        later = [loader for loader in loaders[below:] if loader is not self and not loader.end_of_dataloader]
        self.gradient_state.dataloader_references = [*loaders[:below], *later, self]

    def _set_remainder(self, loaded: BatchWithMeta | None) -> None:
        """Set the number of samples in the last round, if not known before."""
        if self.dataset_parts > 1:  # other ranks may have a different number of samples
            return
        if loaded is not None and loaded.real_in_step is not None:
            real = loaded.real_in_step
            self.remainder = real % self.stride if self.counts_samples else real
        elif self.remainder < 0 and not self.is_sharded:
            rows = self.batch_size_seen if self.real_in_batch is None else self.real_in_batch
            self.remainder = -1 if rows is None else rows % self.stride


def _sharding_first(shard: Callable[[Any], Any], start_copy: StartCopy | None) -> StartCopy:
    """Shard batches before the host-to-device copy: checks run on the host, and only shards are copied."""

    def shard_and_copy(item: Any) -> Any:
        item = replace(item, batch=shard(item.batch)) if type(item) is BatchWithMeta else shard(item)
        return item if start_copy is None else start_copy(item)

    return shard_and_copy


@contextmanager
def override_even_batches(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Change `even_batches` of loaders until the context ends.

    Args:
        loaders: Prepared loaders. A warning is logged for loaders whose data we do not shard.
        even_batches: The value; `None` changes nothing.
    """
    sharders: list[Any] = []
    if even_batches is not None:
        for loader in loaders:
            if (sharder := loader.sharder) is None:
                logger.warning(
                    "even_batches=%r has no effect on %s: its data is not sharded across the processes.",
                    even_batches,
                    type(loader).__name__,
                )
            else:
                sharders.append(sharder)
    before = [sharder.even_batches for sharder in sharders]
    try:
        for sharder in sharders:
            sharder.even_batches = bool(even_batches)
        yield
    finally:
        for sharder, value in zip(sharders, before, strict=True):
            sharder.even_batches = value
