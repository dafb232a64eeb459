"""A pass over a loader with one batch prefetched, and what is known of the batch that was yielded."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from accel_ops.tree import ignorant_find_batch_size
from accel_state.gradient_state import GradientState
from accel_train.data.adapter import DataLoaderAdapter
from accel_train.data.iterable_shard import BatchWithMeta, IterableDatasetShard
from accel_train.data.reading import END
from accel_train.data.samplers import innermost_sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from accel_train.data.device_transfer import BatchTransfer
    from accel_train.data.reading import Reading, StartCopy
    from accel_train.step_meter import StepMeter

logger = logging.getLogger(__name__)


class DataLoaderStateMixin:
    """What a loader knows about the batch that it yielded last, for the gradient state and others.

    Args:
        *args: For the next class.
        **kwargs: For the next class.

    Attributes:
        end_of_dataloader (bool): Whether the batch is the last one.
        remainder (int): How many samples are in the last batches of all ranks together if these are not
            complete, 0 if they are, -1 while that is not known.
        real_in_batch (int | None): How many samples of the batch, from its beginning, are not padding; all
            of them if `None`.
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
        """Number of samples in the batch, padding included; `None` where it holds no tensors."""
        return ignorant_find_batch_size(self._batch)

    def reset(self) -> None:
        """Forget the last pass."""
        self.end_of_dataloader = False
        self.remainder = -1
        self.real_in_batch = None
        self._batch = None

    def begin(self) -> None:
        """Begin a pass: the loader becomes the active one."""
        self.reset()
        self.gradient_state._add_dataloader(self)  # pyright: ignore[reportPrivateUsage]

    def end(self) -> None:
        """End a pass, complete or not: the loader that was active before is so again."""
        self._batch = None
        self.gradient_state._remove_dataloader(self)  # pyright: ignore[reportPrivateUsage]


class PreparedLoader(DataLoaderStateMixin, DataLoaderAdapter):
    """What `DataLoaderShard`, `DataLoaderDispatcher` and `SkipDataLoader` share.

    Attributes:
        shard_sequences (Callable | None): Shards the sequences of a batch; they stay full if `None`.
        meter (StepMeter | None): Measures how long each batch is waited for.
        resume_mid_epoch (bool): Whether `load_state` lets it go on with the next batch, stateful or not.
    """

    shard_sequences: Callable[[Any], Any] | None = None
    meter: StepMeter | None = None
    resume_mid_epoch: bool = False

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
        """Copy or pickle the loader without what is known of a pass, and without what measures this one."""
        make, arguments, state = super().__reduce_ex__(protocol)
        before = {"end_of_dataloader": False, "remainder": -1, "real_in_batch": None, "_batch": None}
        return make, arguments, state | before | {"meter": None}

    @property
    def batch_size_seen(self) -> int | None:
        """Number of samples in the batch, padding included; `None` where nothing tells."""
        if self.real_in_batch is not None and (rows := self._rows_of_padded()) is not None:
            return rows
        return super().batch_size_seen

    def _rows_of_padded(self) -> int | None:
        """What padded the batch knows its size, whatever tensors there are in it."""
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
            sampler: Another one over the same dataset.

        Raises:
            ValueError: The loader has a batch sampler of its own, without a sampler below.
        """
        above: Any = self.sampler if self.batch_sampler is None else self.batch_sampler
        while (below := getattr(above, "batch_sampler", None)) is not None:
            above = below
        if getattr(above, "sampler", None) is None:
            raise ValueError(f"{above!r} has no sampler that could be replaced by {sampler!r}.")
        above.sampler = sampler

    def skipping(self, batches: int) -> Self:
        """Return a copy of this loader whose next pass begins later in the epoch.

        Both count epochs together, and each knows the position of the other's pass.
        """
        other = copy(self)
        other._progress, other.meter = self._progress, self.meter
        other.skip_batches = self.skip_batches + batches
        position, self._resume = self._resume, None
        if (
            position is not None and self._indices is not None
        ):  # the batches to leave out are those of its order
            other.skip_batches = 0
            other._resume = replace(position, consumed=(batches * self.stride,))
        return other

    def _pass(
        self, batch_transfer: BatchTransfer | None = None, *, before: Callable[[], None] | None = None
    ) -> Generator[Any]:
        """Yield the batches of one pass."""
        batches = self._batches(batch_transfer, before)
        return batches if self.meter is None else self.meter.timed(self, batches)

    def _batches(
        self, batch_transfer: BatchTransfer | None, before: Callable[[], None] | None
    ) -> Generator[Any]:
        if before is not None:
            before()
        epoch = self.iteration
        self.set_epoch(epoch)
        self.begin()
        reading: Reading | None = None
        try:
            reading = self._open()
            advance, padded = reading.advance, None
            facts = vars(self)  # torch's loaders have a slow `__setattr__`
            start_copy, finish_copy = (
                (None, None)
                if batch_transfer is None
                else (batch_transfer.start_copy, batch_transfer.finish_copy)
            )
            if self.shard_sequences is not None:
                start_copy = _sharding_first(self.shard_sequences, start_copy)
            for item, following in reading.pairs(start_copy):
                if padded is None:  # by now the order is drawn
                    padded, remainder = reading.opened()
                    self.remainder = remainder if self.dataset_parts == 1 else -1
                loaded = item if type(item) is BatchWithMeta else None
                batch = item if loaded is None else loaded.batch
                if padded:
                    facts["real_in_batch"] = padded.get(reading.taken)
                reading.taken += 1
                if advance is not None:
                    advance(loaded)
                    if not padded:
                        facts["real_in_batch"] = None if loaded is None else loaded.real
                if finish_copy is not None:
                    batch = finish_copy(batch)
                facts["_batch"] = batch
                if following is END:
                    facts["end_of_dataloader"] = True
                    self._last(loaded)
                yield batch
        finally:
            self.end()
            self._close(reading)
            if self.iteration == epoch:  # nobody has chosen another one meanwhile
                self.iteration = epoch + 1

    def _last(self, loaded: BatchWithMeta | None) -> None:
        """Find out how many samples the last round has, where that was not known before."""
        if self.dataset_parts > 1:  # how many the others have is not known
            return
        if loaded is not None and loaded.real_in_step is not None:
            self.remainder = loaded.real_in_step % self.stride
        elif self.remainder < 0 and not self.is_sharded:
            rows = self.batch_size_seen if self.real_in_batch is None else self.real_in_batch
            self.remainder = -1 if rows is None else rows % self.stride


def _sharding_first(shard: Callable[[Any], Any], start_copy: StartCopy | None) -> StartCopy:
    """Shard batches where they were read: checks need no device then, and only shards are copied."""

    def shard_and_copy(item: Any) -> Any:
        item = replace(item, batch=shard(item.batch)) if type(item) is BatchWithMeta else shard(item)
        return item if start_copy is None else start_copy(item)

    return shard_and_copy


@contextmanager
def override_even_batches(loaders: Iterable[Any], even_batches: bool | None) -> Generator[None]:
    """Give loaders another `even_batches` until the context ends.

    Args:
        loaders: Prepared loaders. For one whose data is sharded elsewhere a warning says that this has no
            effect.
        even_batches: The value; `None` leaves all as they are.
    """
    sharders: list[Any] = []
    if even_batches is not None:
        for loader in loaders:
            if (sharder := loader.sharder) is None:
                logger.warning(
                    "even_batches=%r has no effect on %s: nothing shards its data across the processes.",
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
