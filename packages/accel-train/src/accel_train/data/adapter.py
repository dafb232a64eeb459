"""Prepared loaders: torch loaders of a rank's batches on its device, which save and resume their position."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, default_convert, get_worker_info

from accel_ops.modules import replaced_attributes
from accel_ops.tree import ignorant_find_batch_size
from accel_state.accelerator_state import GradientState
from accel_state.errors import MissingDependencyError
from accel_state.frozen import frozen
from accel_state.labels import RNGType
from accel_state.rng import synchronize_rng_states
from accel_train import observing
from accel_train.data.samplers import (
    OrderState,
    innermost_sampler,
    record_source,
    replace_sampler,
    restore_source,
)
from accel_train.data.shards import (
    BatchPlan,
    BatchSamplerShard,
    BatchWithMeta,
    Draw,
    IterableDatasetShard,
    MetaCollate,
    index_options,
)
from accel_train.data.transfer import BatchTransfer, batch_transfer

if TYPE_CHECKING:
    from accel_plugins.torchft.groups import ReplicaGroups
    from accel_train.checkpoint.preemption import Preemption
    from accel_train.profiling import StepMeter


logger = logging.getLogger(__name__)
STATE_FORMAT = 1
_OUR_KEYS = frozenset({"format", "epoch", "position", "source", "shards"})
_INDEXING = ("batch_size", "shuffle", "sampler", "drop_last", "batch_sampler")  # what selects indices

T_co = TypeVar("T_co", covariant=True)
StartCopy = Callable[[Any], Any]
"""Starts the copy of a batch to the device."""
END: Any = object()
"""The item after the last one of an iteration."""


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


@dataclass
class Pass:
    """An iteration over a loader's data, which begins at a position.

    Args:
        batches: The batches, some of them as `BatchWithMeta`.
        start: The position from which batches are counted.
        stride: The change of the position by one batch.
        taken: The number of batches after `start` that were yielded before.
        facts: The facts about the last batch, by the loader's attributes.
        last_worker: The worker that read the last batch.
        by_worker: The number of batches that each worker has read.
        torchdata: The state of torchdata's loader after the last batch.
        draw: The order and the padding of the indices.
    """

    batches: Iterator[Any]
    start: Position
    stride: int = 0
    taken: int = 0
    draw: Draw = field(default_factory=Draw)
    loader: object = None
    epoch: int = 0
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    last_worker: int | None = None
    by_worker: Counter[int] = field(default_factory=Counter[int])
    torchdata: dict[str, Any] | None = None

    def count(self, loaded: BatchWithMeta) -> None:
        """Count a batch that is about to be yielded; one without metadata counts as `taken` only."""
        self.taken += loaded.read
        self.torchdata = loaded.torchdata
        for worker in loaded.workers:
            self.by_worker[worker] += 1
            self.last_worker = worker

    def position(self) -> Position:
        """Return the position in the epoch after the batches that were counted."""
        before, last = self.start.consumed, self.last_worker
        counts = self.by_worker if len(before) > 1 else {0: self.taken}
        return replace(
            self.start,
            consumed=tuple(number + counts[worker] * self.stride for worker, number in enumerate(before)),
            next_worker=self.start.next_worker if last is None else (last + 1) % len(before),
            order=self.start.order if self.draw.order is None else self.draw.order,
            torchdata=self.torchdata,
        )


def on_batch(function: Callable[[Any], Any], item: Any) -> Any:
    """Replace the batch in an item, itself a batch or a `BatchWithMeta`, with a function's result."""
    return replace(item, batch=function(item.batch)) if type(item) is BatchWithMeta else function(item)


@dataclass(eq=False)
class RotatedWorkerIds:
    """A `worker_init_fn` that rotates the ids of workers, so that reading resumes at the right worker.

    Torch's loader begins with worker 0; to resume at worker 2, its worker 0 gets the id 2.
    """

    inner: Callable[[int], None] | None
    first: int

    def __call__(self, worker_id: int) -> None:
        """Set the id that `get_worker_info` returns."""
        info = get_worker_info()
        if info is not None:
            worker_id = (worker_id + self.first) % info.num_workers
            object.__setattr__(info, "id", worker_id)  # WorkerInfo is frozen
        if self.inner is not None:
            self.inner(worker_id)


@dataclass(eq=False)
class WorkersEpoch:
    """A `worker_init_fn` through which an iterable dataset in persistent workers follows `set_epoch`.

    Each worker has a copy of the dataset, which begins every iteration with the epoch set last.
    """

    inner: Callable[[int], None] | None
    _epoch: torch.Tensor = field(default_factory=lambda: torch.tensor(-1, device="cpu"), init=False)

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


@dataclass(slots=True)
class LoaderProgress:
    """The progress of a loader, shared with the loaders that `skipping` returns.

    `passes` are the open iterations; the last one has yielded last.
    """

    epoch: int = 0
    passes: list[Pass] = field(default_factory=list["Pass"])


_NO_FACTS = {
    "end_of_dataloader": False,
    "remainder": -1,
    "real_in_batch": None,
    "_batch": None,
    "_rows": None,
}


class DataLoaderStateMixin:
    """Facts about the last batch that a loader yielded, for the gradient state and others.

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
    _rows: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gradient_state = GradientState()

    @property
    def batch_size_seen(self) -> int | None:
        """Number of samples in the batch, padding included; `None` if it has no tensors."""
        return ignorant_find_batch_size(self._batch)

    def reset(self) -> None:
        """Reset the facts to their state before an iteration."""
        vars(self).update(_NO_FACTS)

    def begin(self) -> None:
        """Begin an iteration: the loader becomes the active one."""
        vars(self).update(_NO_FACTS)
        self.gradient_state._add_dataloader(self)

    def end(self) -> None:
        """End an iteration, complete or not: the previously active loader becomes active again."""
        self._batch = None
        self.gradient_state._remove_dataloader(self)


class PreparedLoader(DataLoaderStateMixin, DataLoader[T_co]):
    """A torch loader of this rank's batches on its device, which saves and resumes its position in the epoch.

    `prepare_data_loader` creates it from a torch loader and shards the data; this class only reads. For type
    checkers, it yields the annotated type of torch's `DataLoader`.

    Args:
        dataset: The dataset to load.
        use_stateful_dataloader: Read through torchdata's `StatefulDataLoader`, which saves the state of
            stateful datasets.
        batch_sampler: Yields batches of indices.
        device: The device of batches; not moved if `None`.
        rng_types: The generators that are synchronised across ranks at the beginning of each epoch.
        synchronized_generator: The generator that `"generator"` in `rng_types` means.
        skip_batches: Number of batches that the first iteration skips; later ones are complete.
        torch_device_mesh: The device mesh; ranks that differ along some of its axes only have the
            same batches.
        iteration: The first epoch.
        _drop_last: Whether an incomplete last batch is dropped.
        _non_blocking: Whether a batch is copied to the device while the loop computes on the previous one.
        **kwargs: As for `torch.utils.data.DataLoader`.

    Attributes:
        shard_sequences (Callable | None): Shards the sequences of a batch; they stay full if `None`.
        meter (StepMeter | None): Measures the time that the loop waits for each batch.
        preemption (Preemption | None): Detects when a step ends.
        replicas (ReplicaGroups | None): Sets the position after a replica group was healed.
        resume_mid_epoch (bool): Whether `load_state` resumes it at the next batch, stateful or not.

    Raises:
        MissingDependencyError: torchdata is requested and not installed.
    """

    shard_sequences: Callable[[Any], Any] | None = None
    meter: StepMeter | None = None
    preemption: Preemption | None = None
    replicas: ReplicaGroups | None = None
    resume_mid_epoch: bool = False
    _stateful_class: Any = None
    _splits_batches = False

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        *,
        device: torch.device | str | int | None = None,
        rng_types: Sequence[str | RNGType] | None = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        snapshot_every_n_steps: int = 1,
        **kwargs: Any,
    ) -> None:
        options = kwargs if batch_sampler is None else {**kwargs, "batch_sampler": batch_sampler}
        self.index_shard: BatchSamplerShard | None = None
        self._shard: BatchSamplerShard | IterableDatasetShard | None = None
        if isinstance(dataset, IterableDataset):
            self._shard = dataset if isinstance(dataset, IterableDatasetShard) else None
            if options.get("num_workers") or getattr(dataset, "mark_padding", False):
                batched = options.get("batch_size", 1) is not None
                collate = options.get("collate_fn") or (default_collate if batched else default_convert)
                options = {**options, "collate_fn": MetaCollate(collate, batched=batched)}
        else:
            sampling = {name: value for name, value in options.items() if name in _INDEXING}
            plain = DataLoader(dataset, **sampling, generator=options.get("generator"))
            collates = plain.batch_sampler is not None
            indices = index_options(plain.batch_sampler if collates else plain.sampler, collates=collates)
            options = {name: value for name, value in options.items() if name not in _INDEXING} | indices
            self._shard = self.index_shard = indices.get("batch_sampler", indices.get("sampler"))
        super().__init__(dataset, **options)
        self._options = options
        if use_stateful_dataloader:
            try:
                stateful = import_module("torchdata.stateful_dataloader")
            except ImportError as error:
                raise MissingDependencyError(
                    "use_stateful_dataloader=True needs torchdata: pip install 'accel-train[stateful]'."
                ) from error
            self._stateful_class = stateful.StatefulDataLoader
        self._stateful: Any = None
        self.use_stateful_dataloader = use_stateful_dataloader
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self.device = None if device is None else torch.device(device)
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self.torch_device_mesh = torch_device_mesh
        self.dataset_parts = 1  # number of ranks with different data, if not sharded by our samplers
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self._batches_per_step = 1  # batches of the dataset per batch on every rank
        self._reads = True
        self._has_drawn = False
        self._resume: Position | None = None
        self._resume_epoch: int | None = None
        self._progress = LoaderProgress(epoch=iteration)
        self._workers_epoch: WorkersEpoch | None = None
        if self.persistent_workers and self._shard is None and hasattr(dataset, "set_epoch"):
            self._workers_epoch = WorkersEpoch(self.worker_init_fn)
            self.wrap_worker_init(lambda _: self._workers_epoch)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - it is not set
        """The class; torchdata's for `isinstance`, if its loader reads."""
        return self._stateful_class or type(self)

    def __reduce__(self) -> Any:
        """Copy or pickle the loader without its current iteration and its observers."""
        state = {**vars(self), **_NO_FACTS, "_progress": LoaderProgress(epoch=self.iteration)}
        state |= {"meter": None, "preemption": None, "replicas": None}
        # Persistent workers belong to this loader.
        return object.__new__, (type(self),), {**state, "_iterator": None, "_stateful": None}

    @property
    def base_dataloader(self) -> Iterable[Any]:
        """The loader that reads the data: this one, or torchdata's."""
        return self._stateful or self

    @property
    def iteration(self) -> int:
        """The epoch of the current iteration, or of the next one."""
        return self._progress.epoch

    @iteration.setter
    def iteration(self, epoch: int) -> None:
        self._progress.epoch = epoch

    def __len__(self) -> int:
        """Number of batches of this rank, without those that the next iteration skips."""
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
        self._progress.epoch = epoch
        parts: list[Any] = [self.dataset]
        if self.index_shard is not None:
            self.index_shard.epoch = epoch
            part: Any = self.index_shard.batch_sampler
            while part is not None:
                parts.append(part)
                part = getattr(part, "batch_sampler", getattr(part, "sampler", None))
        for part in parts:
            if (set_epoch := getattr(part, "set_epoch", None)) is not None:
                set_epoch(epoch)
        if self._workers_epoch is not None:
            self._workers_epoch.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: the epoch, and during an iteration the data consumed, up to the last batch.

        The position is valid for all ranks, and for any number of ranks.

        Returns:
            Plain data, which `torch.load(..., weights_only=True)` reads. With `use_stateful_dataloader` it is
            torchdata's state together with the position, during iterations that began at the beginning of an
            epoch or at a state of torchdata.
        """
        position = self._position()
        return {
            **self.torchdata_state(),
            "format": STATE_FORMAT,
            "epoch": passes[-1].epoch if (passes := self._progress.passes) else self.iteration,
            "position": None
            if position is None
            else {
                "unit": position.unit,
                "consumed": list(position.consumed),
                "next_worker": position.next_worker,
                "order": position.order,
            },
            "source": record_source(self.order_source),
            **({"shards": self._shards} if self.use_stateful_dataloader else {}),
        }

    def torchdata_state(self) -> dict[str, Any]:
        """Return torchdata's part of the state, for any `StatefulDataLoader`; empty if there is none."""
        position = self._position()
        return {} if position is None else position.torchdata or {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a position in the next iteration.

        Args:
            state_dict: A result of `state_dict`, from a run with any number of processes, or the state of a
                `StatefulDataLoader` of a run with this number.

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
        self._resume = None
        if position is not None:
            unit, consumed, begin = position["unit"], tuple(position["consumed"]), self._begin
            if self._reads and unit != begin.unit:
                raise ValueError(
                    f"The saved data position counts {unit!r}, but this loader counts {begin.unit!r}. "
                    "Build the loader as in the saved run."
                )
            if self._reads and len(consumed) != len(begin.consumed):
                raise ValueError(
                    f"The saved data position is for {len(consumed)} worker(s), each with a part of the "
                    f"iterable dataset, but this loader has {len(begin.consumed)}. Pass "
                    f"num_workers={len(consumed)!r} as in the saved run."
                )
            facts = {"next_worker": position["next_worker"], "order": position["order"]}
            self._resume = Position(unit=unit, consumed=consumed, **facts)
        self._resume_epoch = self.iteration = state_dict["epoch"]
        torchdata = {name: value for name, value in state_dict.items() if name not in _OUR_KEYS}
        if self._resume is not None and torchdata and state_dict["shards"] == self._shards:
            self._resume = replace(self._resume, torchdata=torchdata)
        restore_source(self.order_source, state_dict.get("source", {}))
        self._has_drawn = position is not None or self.iteration > 0

    def load_epoch(self, state_dict: dict[str, Any]) -> None:
        """Restart the epoch of a position in the next iteration, in the same order.

        Args:
            state_dict: A result of `state_dict`, also of a loader with another number of workers.
        """
        position = state_dict["position"]
        if position is not None and self._reads:
            start = {"consumed": self._begin.consumed, "next_worker": 0}
            position = {**position, **start} if position["unit"] == self._begin.unit else None
        self.load_state_dict({**state_dict, "position": position, "shards": None})

    def _position_in(self, state: dict[str, Any]) -> Position | None:
        """Return the position in a state of torchdata, for the same numbers of ranks and workers."""
        if state.get("_iterator_finished"):
            return None
        if "_snapshot" in state:
            batches = state["_snapshot"]["_snapshot_step"] + state["_steps_since_snapshot"]
        elif "_num_yielded" in state:
            batches = state["_num_yielded"]
        else:
            raise ValueError(
                "This is neither an accel data loader position nor a state of torchdata's "
                f"StatefulDataLoader: it has the keys {sorted(state)!r}."
            )
        start, stride = self._begin, self._plan.stride
        rounds, next_worker = divmod(batches, len(start.consumed))
        consumed = [stride * (rounds + (worker < next_worker)) for worker in range(len(start.consumed))]
        return replace(start, consumed=tuple(consumed), next_worker=next_worker, torchdata=state)

    def wrap_worker_init(self, wrap: Callable[[Any], Any]) -> None:
        """Replace `worker_init_fn` with the result of a function of it."""
        self.worker_init_fn = self._options["worker_init_fn"] = wrap(self.worker_init_fn)

    def adjust_state_dict_for_prefetch(self) -> None:
        """Do nothing: `state_dict` returns the position of the last yielded batch, not of prefetched ones.

        Loaders of other libraries that count prefetched batches may override this.
        """

    def _position(self) -> Position | None:
        """Return the position of the current iteration, or the one at which the next resumes, if any."""
        passes = self._progress.passes
        return passes[-1].position() if passes else self._resume

    @property
    def _begin(self) -> Position:
        """The beginning of an epoch; only the workers of an iterable dataset count batches separately."""
        unit, readers = "stream", max(1, self.num_workers)
        if self.index_shard is not None:
            unit, readers = "samples" if self.index_shard.plan.counts_samples else "batches", 1
        unit = unit if self.dataset_parts == 1 else f"{unit}, 1 of {self.dataset_parts} parts"
        return Position(unit=unit, consumed=(0,) * readers)

    @property
    def _plan(self) -> BatchPlan:
        """The plan of an epoch."""
        return BatchPlan(rows=self.batch_size or 1) if self._shard is None else self._shard.plan

    @property
    def stride(self) -> int:
        """The change of the position by one batch on every rank."""
        return self._plan.stride * self._batches_per_step

    @property
    def counts_samples(self) -> bool:
        """Whether `stride` is a number of samples; else of batches, whose sizes are not known in advance."""
        shard = self.index_shard
        return self.batch_size is not None if shard is None else shard.plan.counts_samples

    @property
    def sharder(self) -> Any | None:
        """The object that shards this loader's data and has `even_batches`; `None` if there is none."""
        return None if self.dataset_parts > 1 else self._shard

    @property
    def order_source(self) -> object:
        """The object whose generator determines the order: the innermost sampler, or the iterable dataset."""
        if self.index_shard is not None:
            return innermost_sampler(self.index_shard)
        return getattr(self._shard, "dataset", self.dataset)

    @property
    def is_sharded(self) -> bool:
        """Whether this rank reads only a part of the data."""
        return self._shards > 1 or self.dataset_parts > 1

    @property
    def _shards(self) -> int:
        return 1 if self._shard is None else self._shard.num_processes

    def _open(self) -> Pass:
        """Begin the next iteration: at a loaded position, after `skip_batches`, or at the beginning."""
        position, self._resume = self._resume, None
        skip, self.skip_batches = self.skip_batches * self._batches_per_step, 0
        shard, start, plan = self.index_shard, position or self._begin, self._plan
        stride, taken = plan.stride, 0
        # The number of samples of a worker's stream is known only by reading; torchdata counts by itself.
        seeks = shard is not None or (not self.use_stateful_dataloader and self.num_workers == 0)
        if skip and seeks and start.torchdata is None:
            start = replace(start, consumed=(start.consumed[0] + skip * stride,))
            skip = 0
        by_torchdata = self.use_stateful_dataloader and (start.torchdata or not any(start.consumed))
        if shard is None:
            draw = Draw(padded_rows=None if self.batch_size is None else plan.rows)
            if start.order:
                restore_source(self.order_source, start.order)
            elif isinstance(self._shard, IterableDatasetShard):
                self._shard.seed_with_epoch()
            start = replace(start, order=start.order or record_source(self.order_source) or None)
        else:
            if by_torchdata:  # it skips what was consumed
                taken = start.consumed[0] // stride
                start = replace(start, consumed=(0,))
            shard.draw = draw = Draw(start.consumed[0], start.order)
        # Workers got their seed when the resumed epoch began; persistent ones when the resumed run began.
        draws = position is None and not (self._has_drawn and self.persistent_workers)
        with nullcontext() if draws else self._throwaway_generator():
            if by_torchdata:
                batches = self._read_by_torchdata(start.torchdata, taken or sum(start.consumed) // stride)
            elif shard is None and any(start.consumed):
                batches = self._rest_of_stream(start, stride)
            else:
                batches = super().__iter__()
        if shard is not None:
            shard.draw = None
        reading = Pass(batches, start, stride, taken, draw)
        for item in islice(batches, skip):
            reading.count(item if type(item) is BatchWithMeta else BatchWithMeta(item))
        return reading

    def _read_by_torchdata(self, state: dict[str, Any] | None, read: int) -> Iterator[BatchWithMeta]:
        """Read by torchdata's loader, from a state after a number of batches; yield the state with each."""
        if self._stateful is None:
            options = {**self._options, "snapshot_every_n_steps": self.snapshot_every_n_steps}
            self._stateful = self._stateful_class(self.dataset, **options)
        self._stateful.generator = self.generator
        if state is not None:
            self._stateful.load_state_dict(state)
        batches = iter(self._stateful)
        if state is not None:  # torchdata counts twice the batches it reads to reach its position
            vars(batches)["_num_yielded"] = read

        def with_states() -> Iterator[BatchWithMeta]:
            for item in batches:
                loaded = item if type(item) is BatchWithMeta else BatchWithMeta(item)
                loaded.torchdata = batches.state_dict()
                yield loaded

        return with_states()

    def _rest_of_stream(self, start: Position, stride: int) -> Iterator[Any]:
        """Read an iterable dataset from a position on, through a temporary loader."""
        dataset: Any = self.dataset
        is_shard = isinstance(dataset, IterableDatasetShard)
        stream = copy(dataset) if is_shard else IterableDatasetShard(dataset, stride)
        stream.starts = start.consumed
        init = RotatedWorkerIds(self.worker_init_fn, start.next_worker)
        options: dict[str, Any] = {**self._options, "worker_init_fn": init, "generator": self.generator}
        options["persistent_workers"] = False
        return iter(DataLoader(stream, **options))

    def _throwaway_generator(self) -> AbstractContextManager[None]:
        """Give torch's loader a copy of its generator for its worker seed, so that nothing is drawn."""
        state = torch.get_rng_state() if self.generator is None else self.generator.get_state()
        return replaced_attributes(self, {"generator": torch.Generator().set_state(state)})

    @property
    def batch_size_seen(self) -> int | None:
        """Number of samples in the batch, padding included; `None` if it is not known."""
        is_known = self.real_in_batch is not None and self._shard is not None
        return (self._rows if is_known else None) or super().batch_size_seen

    @property
    def total_batch_size(self) -> int:
        """Number of samples in the batches of all ranks together."""
        return self.stride * self.dataset_parts

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset, over all ranks."""
        dataset: Any = self.dataset
        return len(getattr(self._shard, "dataset", dataset))

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
        if position is not None and position.order is not None:
            start = (0,) * len(position.consumed)
            skipped._resume = replace(position, consumed=start, next_worker=0, torchdata=None)
        return skipped

    def __iter__(self) -> Generator[T_co]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch says less
        """Yield this rank's batches."""
        transfer = batch_transfer(self.device, prefetching=self._non_blocking or self.pin_memory)

        def read() -> Generator[Any]:
            begin = partial(self._batches, transfer)
            batches = begin() if self.replicas is None else self.replicas.watched(self, begin)
            if self.meter is not None:
                batches = self.meter.timed(self, batches)
            return batches if self.preemption is None else self.preemption.watched(batches)

        observer = observing.observer
        return read() if observer is None else observer.batches(self, read)

    def _batches(self, transfer: BatchTransfer) -> Generator[Any]:
        # 1. Begin the iteration.
        if self.rng_types:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        progress, state = self._progress, self.gradient_state
        epoch, passes = progress.epoch, progress.passes
        self.set_epoch(epoch)
        self.begin()
        facts = vars(self)  # torch's loaders have a slow `__setattr__`
        reading: Pass | None = None
        try:
            reading = self._open()
            reading.loader, reading.epoch = self, epoch
            passes.append(reading)
            draw, finish_copy = reading.draw, transfer.finish_copy
            is_known = self.dataset_parts == 1 and not self._splits_batches
            start_copy, cut = transfer.start_copy, self.shard_sequences
            if cut is not None:  # before the copy: checks run on the host, and only shards are copied
                copy_to = transfer.start_copy
                start_copy = cut if copy_to is None else lambda batch: copy_to(cut(batch))
            # 2. Yield each batch, with the facts about it.
            for item, following in self._pairs(reading, start_copy):
                loaded = item if type(item) is BatchWithMeta else None
                batch = item if loaded is None else loaded.batch
                real = (
                    draw.padded.get(reading.taken) if loaded is None or loaded.real is None else loaded.real
                )
                if loaded is None:
                    reading.taken += 1
                else:
                    reading.count(loaded)
                if finish_copy is not None:
                    batch = finish_copy(batch)
                reading.facts = {
                    "end_of_dataloader": following is END,
                    "remainder": draw.remainder if is_known else -1,
                    "real_in_batch": real,
                    "_batch": batch,
                    "_rows": draw.padded_rows,
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
            if reading in passes:
                passes.remove(reading)
            for outer in passes:  # an outer iteration over this loader has its facts again
                if outer.loader is self:
                    facts.update(outer.facts)
            if progress.epoch == epoch:
                progress.epoch = epoch + 1

    def _pairs(self, reading: Pass, start_copy: StartCopy | None) -> Iterator[tuple[Any, Any]]:
        """Yield each batch with the next item: `END` after the last batch, else anything.

        `start_copy` is called one batch ahead.
        """
        batches = (
            reading.batches if start_copy is None else map(partial(on_batch, start_copy), reading.batches)
        )
        return pairwise(chain(batches, (END,)))

    def _activate(self, reading: Pass) -> None:
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


DataLoaderAdapter = PreparedLoader
"""The base of prepared loaders."""


class DataLoaderShard(PreparedLoader[T_co]):
    """A torch loader that yields this rank's batches on its device, and marks the last one.

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
        named = {"device": device, "rng_types": rng_types, "synchronized_generator": synchronized_generator}
        kwargs |= {"skip_batches": skip_batches, "use_stateful_dataloader": use_stateful_dataloader}
        kwargs |= {"_drop_last": _drop_last, "_non_blocking": _non_blocking}
        super().__init__(dataset, torch_device_mesh=torch_device_mesh, iteration=iteration, **named, **kwargs)


@contextmanager
def override_even_batches(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Change `even_batches` of loaders until the context ends.

    Args:
        loaders: Prepared loaders. A warning is logged for loaders whose data we do not shard.
        even_batches: The value; `None` changes nothing.
    """
    with ExitStack() as stack:
        for loader in () if even_batches is None else loaders:
            if (sharder := loader.sharder) is not None:
                stack.enter_context(replaced_attributes(sharder, {"even_batches": bool(even_batches)}))
                continue
            logger.warning(
                "even_batches=%r has no effect on %s: its data is not sharded across the processes.",
                even_batches,
                type(loader).__name__,
            )
        yield
