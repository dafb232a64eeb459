"""Shard batches of indices, and samples of iterable datasets, across ranks; detect sharded data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from accel_state.frozen import frozen
from accel_state.torch_private import pin_memory
from accel_train.data.samplers import (
    OrderState,
    SeedableRandomSampler,
    drawn,
    indices_from,
    innermost_sampler,
    is_plain_batch_sampler,
    iterate_seeded,
    known_order,
    record_order,
    replace_sampler,
    replay_order,
)

logger = logging.getLogger(__name__)


@frozen
class BatchPlan:
    """The plan that splits an epoch into *rounds* of one batch for every rank, in rank order.

    Round `k` of an epoch that begins at sample `start` has the samples from `start + k * stride` on; rank `r`
    gets its `r`-th slice.

    Args:
        batch_size: Size of the sharded batches: of one rank, or with `split` of all ranks; `None` if unknown.
        split: Whether a round is one batch, of which every rank gets a slice; else it has one batch per rank.
        even: Complete the last round with samples from the epoch's beginning, so that ranks have the same
            number of batches of one size; with full batches from there if the size is unknown. Otherwise some
            ranks may get a shorter last batch, or one batch less.
        static_shapes: Complete the last batch of a single rank, too, for devices that recompile for every
            shape; needs `even`.
    """

    num_processes: int = 1
    process_index: int = 0
    batch_size: int | None
    drop_last: bool = False
    split: bool = False
    even: bool = True
    static_shapes: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.process_index < self.num_processes:
            raise ValueError(
                f"process_index={self.process_index!r} is not one of the "
                f"num_processes={self.num_processes!r} processes, counted from 0."
            )
        if self.split and (self.batch_size is None or self.batch_size % self.num_processes):
            raise ValueError(
                "split_batches=True shards every batch across the processes, but "
                f"batch_size={self.batch_size!r} is not a round multiple of "
                f"num_processes={self.num_processes!r}."
            )

    @property
    def rows(self) -> int:
        """Number of samples in a batch of one rank; 1 if unknown."""
        return (self.batch_size or 1) // (self.num_processes if self.split else 1)

    @property
    def stride(self) -> int:
        """Number of samples in a complete round."""
        return self.rows * self.num_processes

    @property
    def batches_per_step_all_ranks(self) -> int:
        """Number of batches of the sharded batch sampler in a complete round."""
        return 1 if self.split else self.num_processes

    @property
    def pads(self) -> bool:
        """Whether an incomplete last round is padded with samples from the epoch's beginning."""
        return self.even and not self.drop_last and (self.num_processes > 1 or self.static_shapes)

    def count(self, total: int) -> int:
        """Return the number of batches of this rank for `total` samples."""
        full_steps, remaining = divmod(total, self.stride)
        has_more = remaining > 0 and (self.even or remaining > self.rows * self.process_index)
        return full_steps + (has_more and not self.drop_last)

    def spans(self, total: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield this rank's batches as spans of positions in the order of the epoch.

        Yields:
            `(first, last)`: a batch has the samples `first … last - 1`. Positions from `total` on are
            padding: `total + i` repeats sample `i % total`.

        Example:
            >>> list(BatchPlan(num_processes=2, process_index=1, batch_size=3).spans(10))
            [(3, 6), (9, 12)]
        """
        first = start + self.process_index * self.rows
        for _ in range(self.count(max(0, total - start))):
            last = first + self.rows
            yield first, last if self.pads else min(last, total)
            first += self.stride

    def count_batches(self, batches: int) -> int:
        """Return this rank's number of batches out of `batches` full ones."""
        full_steps, remaining = divmod(batches, self.batches_per_step_all_ranks)
        has_more = remaining > 0 and (self.even or remaining > self.process_index)
        return full_steps + (has_more and not self.drop_last)

    def assign(
        self, batches: Iterable[Sequence[int]], head: Iterable[Sequence[int]] = ()
    ) -> Iterator[tuple[list[int], int]]:
        """Yield this rank's batches out of a stream of batches of any length.

        Args:
            batches: The batches of the epoch, or the remaining ones.
            head: The preceding batches of the epoch that are needed for padding.

        Yields:
            A batch, and the number of its first samples that are not padding.
        """
        stream = iter(batches)
        seen = list(head)
        step_batches = list(islice(stream, self.batches_per_step_all_ranks))
        while step_batches and not (self.drop_last and len(step_batches) < self.batches_per_step_all_ranks):
            following = list(islice(stream, self.batches_per_step_all_ranks))
            if self.pads and self.pads_with(seen):
                seen.extend(step_batches)
            local = self._local_indices(step_batches)
            padding = self._padding(step_batches, local, seen) if self.split or not following else []
            if local or padding:
                yield local + padding, len(local)
            step_batches = following

    def pads_with(self, seen: Sequence[Sequence[int]]) -> bool:
        """Return whether more batches from the epoch's beginning than these may be needed for padding."""
        return len(seen) < self.num_processes or sum(map(len, seen)) < self.stride

    def _local_indices(self, step_batches: list[Sequence[int]]) -> list[int]:
        """Return this rank's samples of a round; empty if there are none."""
        if not self.split:
            return list(step_batches[self.process_index]) if self.process_index < len(step_batches) else []
        rows = self._rows_of(step_batches[0])
        return list(step_batches[0][self.process_index * rows : (self.process_index + 1) * rows])

    def _rows_of(self, batch: Sequence[int]) -> int:
        """Return each rank's number of samples of a split batch; custom samplers may exceed their size."""
        return max(-(-len(batch) // self.num_processes), self.rows)

    def _padding(
        self, step_batches: list[Sequence[int]], local: list[int], seen: list[Sequence[int]]
    ) -> list[int]:
        """Return the indices with which this rank completes the last round."""
        if not self.pads:
            return []
        if self.batch_size is None and not self.split:
            missing = self.process_index - len(step_batches)
            return [] if missing < 0 else [*seen[missing % len(seen)]]
        if self.split:
            rows = self._rows_of(step_batches[0])
            before = self.process_index * rows - len(step_batches[0])
        else:
            rows = self.rows if self.process_index >= len(step_batches) - 1 else len(local)
            before = (self.process_index - len(step_batches) + 1) * rows - len(step_batches[-1])
        before = max(0, before)
        first = [*chain.from_iterable(seen)]
        return [first[i % len(first)] for i in range(before, before + rows - len(local))]


def _plan_of(shard: BatchSamplerShard | IterableDatasetShard) -> BatchPlan:
    return BatchPlan(
        num_processes=shard.num_processes,
        process_index=shard.process_index,
        batch_size=shard.batch_size,
        drop_last=shard.drop_last,
        split=shard.split_batches,
        even=shard.even_batches,
        static_shapes=shard.static_shapes,
    )


class BatchSamplerShard(BatchSampler):
    """Yield this rank's part of the batches of a batch sampler.

    Args:
        batch_sampler: The batch sampler to shard, or any iterable of lists of indices.
        num_processes: The number of ranks.
        process_index: This rank.
        split_batches: Shard every batch across ranks; otherwise the ranks get full batches, in turn.
        even_batches: Complete the last round with the first samples, so that all ranks get the same number of
            batches of the same size. For batch samplers without a `batch_size`, full batches are repeated.
        static_shapes: As for `BatchPlan`.
        single: Yield the only index of every batch instead of the batch.

    Raises:
        ValueError: The arguments contradict each other.

    Example:
        >>> batches = BatchSampler(range(10), batch_size=3, drop_last=False)
        >>> [list(BatchSamplerShard(batches, 2, rank)) for rank in (0, 1)]
        [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 0, 1]]]
    """

    def __init__(
        self,
        batch_sampler: BatchSampler | Sampler[list[int]] | Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        static_shapes: bool = False,
        single: bool = False,
    ) -> None:
        self.batch_sampler: Any = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.static_shapes = static_shapes
        self.single = single
        _ = self.plan  # refuses arguments that do not fit together
        self.start = 0
        """The position at which iterations begin."""
        self.padded: dict[int, int] = {}
        """In the latest iteration: index of a padded batch -> number of its real samples."""
        self.padded_rows: int | None = None
        """Number of samples in padded batches; `None` before there is one, 0 if they have several sizes."""
        self.order: OrderState | None = None
        """The state that replays the order of the latest iteration."""
        self.replays: OrderState | None = None
        """The order of iterations; a new one if `None`."""
        self.seeds: tuple[int, ...] = ()
        """The seeds of `random`, numpy and torch in epoch 0, if the samplers may draw from them."""
        self.epoch = 0

    @property
    def plan(self) -> BatchPlan:
        """The plan of an epoch; `even_batches` may be changed between epochs."""
        return _plan_of(self)

    @property
    def sampler(self) -> Any:
        """The innermost sampler of indices."""
        return innermost_sampler(self.batch_sampler)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride] - torch's is an attribute
        replace_sampler(self.batch_sampler, sampler)

    @property
    def total_length(self) -> int:
        """Number of batches of the sharded batch sampler."""
        return len(self.batch_sampler)

    @property
    def counts_samples(self) -> bool:
        """Whether positions in the epoch are numbers of samples; otherwise of full batches."""
        return is_plain_batch_sampler(self.batch_sampler)

    @property
    def unit(self) -> str:
        """The unit of positions: `"samples"` or full `"batches"`."""
        return "samples" if self.counts_samples else "batches"

    @property
    def stride(self) -> int:
        """The change of the position by one batch on every rank."""
        return self.plan.stride if self.counts_samples else self.plan.batches_per_step_all_ranks

    def __len__(self) -> int:
        """Number of batches of this rank."""
        return self.length_from(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of indices."""
        batches = self.iterate_from(self.start, self.replays)
        return (batch[0] for batch in batches) if self.single else batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def length_from(self, position: int) -> int:
        """Return the number of batches of this rank after a position.

        Args:
            position: Samples (or full batches, see `counts_samples`) that all ranks together have consumed.
        """
        if self.counts_samples:
            return self.plan.count(max(0, len(self.batch_sampler.sampler) - position))
        return self.plan.count_batches(max(0, len(self.batch_sampler) - position))

    def remainder_from(self, position: int) -> int:
        """Return the number of samples in the last round after a position: 0 if complete, -1 if unknown.

        Args:
            position: As for `length_from`.
        """
        if self.drop_last:
            return 0
        if not self.counts_samples or not isinstance(self.batch_sampler.sampler, Sized):
            return -1
        return max(0, len(self.batch_sampler.sampler) - position) % self.plan.stride

    def iterate_from(self, position: int, order: OrderState | None = None) -> Iterator[list[int]]:
        """Yield this rank's batches after a position.

        Args:
            position: As for `length_from`.
            order: The state that replays the order of the epoch; if `None`, a new order.
        """
        # Unsharded batches come directly from torch's iterator, without a call per batch.
        return chain.from_iterable(self._epoch_from(position, order))

    def _epoch_from(self, position: int, order: OrderState | None) -> Iterator[Iterator[list[int]]]:
        """Draw the epoch; yield one iterator of its batches after a position, then end the epoch."""
        self.padded, self.padded_rows = {}, None
        sampler, plan = self.sampler, self.plan
        with replay_order(sampler, order):  # all random numbers are drawn in here
            self.order = self._record_order(sampler) if order is None else order
            known = known_order(sampler) if self.counts_samples else None
            epoch = sampler.epoch if isinstance(sampler, SeedableRandomSampler) else 0
            if "seeds" in self.order:
                batches = drawn(iterate_seeded(self._seeded_batches(position), self.order["seeds"]))
            elif plan.num_processes == 1 and not plan.pads:
                batches, _ = self._remaining_batches(position, known)
            elif known is not None:
                batches = self._record_padding(_cut(known, plan.spans(len(known), position)))
            else:
                batches = self._record_padding(plan.assign(*self._remaining_batches(position, known)))
        yield batches
        if isinstance(sampler, SeedableRandomSampler):
            sampler.end_epoch(epoch)

    def _record_order(self, sampler: object) -> OrderState:
        order = record_order(sampler)
        if self.seeds:
            order.pop("torch", None)
            order["seeds"] = [seed + self.epoch for seed in self.seeds]
        return order

    def _seeded_batches(self, position: int) -> Iterator[list[int]]:
        """Yield this rank's batches after a position; what the samplers draw is drawn while it is read."""
        yield from self._record_padding(self.plan.assign(*self._remaining_batches(position, None)))

    def _record_padding(self, parts: Iterable[tuple[list[int], int]]) -> Iterator[list[int]]:
        """Yield the batches of pairs (batch, number of real samples); record padded ones in `padded`."""
        padded = self.padded
        for number, (batch, real) in enumerate(parts):
            if real != len(batch):
                padded[number] = real
                self.padded_rows = len(batch) if self.padded_rows in {None, len(batch)} else 0
            yield batch

    def _remaining_batches(
        self, position: int, known: Sequence[int] | None
    ) -> tuple[Iterator[list[int]], list[list[int]]]:
        """Return the batches of all ranks after a position, and earlier batches that padding may need."""
        plan = self.plan
        head: list[list[int]] = []
        if not self.counts_samples:
            batches = drawn(self.batch_sampler)
            for batch in islice(batches, position):
                if plan.pads and plan.pads_with(head):
                    head.append(batch)
            return batches, head
        if known is not None:
            indices = indices_from(known, position)
        else:
            indices = drawn(self.batch_sampler.sampler)
            first = list(islice(indices, min(position, plan.stride if plan.pads else 0)))
            head = [first] if first else []
            indices = islice(indices, position - len(first), None)
        return iter(BatchSampler(cast("Any", indices), self.batch_size, self.drop_last)), head


def _cut(order: Sequence[int], spans: Iterable[tuple[int, int]]) -> Iterator[tuple[list[int], int]]:
    """Cut an order into batches; yield each with the number of its indices that are not padding."""
    total = len(order)
    for first, last in spans:
        batch = list(order[first:last])
        yield batch + [order[i % total] for i in range(max(first, total), last)], len(batch)


Collate = Callable[[Any], Any]


class IterableDatasetShard(IterableDataset[Any]):
    """Yield this rank's samples of an iterable dataset, which every rank reads in full.

    The samples are taken in rounds of one batch for every rank; see `BatchPlan`.

    Args:
        dataset: The dataset to shard, with the same samples in the same order on every rank. A dataset that
            shuffles has a method `set_epoch`, or draws from a `torch.Generator` in its attribute `generator`,
            which is seeded with the epoch.
        batch_size: Size of a batch of one rank, or with `split_batches` of all ranks together.
        drop_last: Drop the last round if it is incomplete; otherwise complete it with samples from the
            beginning.
        num_processes: The number of ranks.
        process_index: This rank.
        split_batches: Whether `batch_size` counts the samples of all ranks.
        even_batches: Whether to complete the last round; otherwise some ranks may get fewer samples.
        mark_padding: Yield the samples that pad a round as `PaddedSample`, for `MetaCollate`.
        starts: The number of samples of the epoch that were consumed before, for every worker of the loader.
        static_shapes: As for `BatchPlan`.

    Raises:
        ValueError: With `split_batches`, the batch size is not a multiple of the number of ranks.

    Example:
        >>> shards = [IterableDatasetShard(range(7), 2, num_processes=2, process_index=r) for r in (0, 1)]
        >>> [list(shard) for shard in shards]
        [[0, 1, 4, 5], [2, 3, 6, 0]]
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        *,
        even_batches: bool = True,
        mark_padding: bool = False,
        starts: tuple[int, ...] = (),
        static_shapes: bool = False,
    ) -> None:
        self.dataset: Any = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.mark_padding = mark_padding
        self.starts = starts
        self.static_shapes = static_shapes
        self._epoch = torch.tensor(
            -1, device="cpu"
        ).share_memory_()  # shared, so that persistent workers see changes
        _ = self.plan  # refuses arguments that do not fit together

    @property
    def plan(self) -> BatchPlan:
        """The plan that shards the samples."""
        return _plan_of(self)

    @property
    def epoch(self) -> int:
        """The last epoch set; initially 0."""
        return max(0, int(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch in this process, the dataset, and persistent workers."""
        self._epoch.fill_(epoch)
        set_epoch_of(self.dataset, epoch)

    def starting_at(self, starts: tuple[int, ...]) -> IterableDatasetShard:
        """Return a shard of the samples that follow the ones consumed by each worker of the loader."""
        remaining = copy(self)
        remaining.starts = starts
        return remaining

    def __len__(self) -> int:
        """Number of samples of this rank, if the dataset has a length."""
        plan = self.plan
        full_steps, remaining = divmod(len(self.dataset), plan.stride)
        if not remaining or plan.drop_last:
            return full_steps * plan.rows
        real = min(max(remaining - plan.process_index * plan.rows, 0), plan.rows)
        return full_steps * plan.rows + (plan.rows if plan.pads else real)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples."""
        # 1. Complete rounds.
        plan, info = self.plan, get_worker_info()
        self._follow_epoch(in_worker=info is not None)
        start = self.starts[0 if info is None else info.id] if self.starts else 0
        stream, head = self._open(start, plan.stride if plan.pads else 0)
        low, high = plan.process_index * plan.rows, (plan.process_index + 1) * plan.rows
        while len(step_samples := list(islice(stream, plan.stride))) == plan.stride:
            if plan.pads and len(head) < plan.stride:
                head += step_samples
            yield from step_samples[low:high]
        if not step_samples or plan.drop_last:
            return
        # 2. The incomplete last round, padded.
        real = step_samples[low:high]
        padding: list[Any] = []
        if plan.pads:
            head += step_samples
            first = max(low - len(step_samples), 0)  # samples before it pad the batches of other ranks
            padding = [head[index % len(head)] for index in range(first, first + plan.rows - len(real))]
        if self.mark_padding:
            if real and not padding:
                real[-1] = PaddedSample(real[-1], len(step_samples), is_padding=False)
            padding = [PaddedSample(sample, len(step_samples), is_padding=True) for sample in padding]
        yield from real + padding

    def _open(self, start: int, needed: int) -> tuple[Iterator[Any], list[Any]]:
        """Return the samples from `start` on, and the samples before it among the first `needed`."""
        if start and isinstance(self.dataset, SeekableDataset):
            head = list(islice(self.dataset.iterate_from(0), min(start, needed)))
            return self.dataset.iterate_from(start), head
        stream = iter(self.dataset)
        head = list(islice(stream, min(start, needed)))
        return islice(stream, start - len(head), None), head

    def _follow_epoch(self, *, in_worker: bool) -> None:
        """In a worker, set the dataset's epoch, or seed its generator with the epoch."""
        if in_worker and self._epoch >= 0:
            set_epoch_of(self.dataset, self.epoch)
        if not self.starts:  # else the loader has set the generator
            self.seed_with_epoch()

    def seed_with_epoch(self) -> None:
        """Seed the dataset's generator with the epoch, for the same order on all ranks."""
        generator = getattr(self.dataset, "generator", None)
        keeps_order = self.static_shapes and self.num_processes == 1
        has_set_epoch = getattr(self.dataset, "set_epoch", None) is not None
        if isinstance(generator, torch.Generator) and not keeps_order and not has_set_epoch:
            generator.manual_seed(self.epoch)


@runtime_checkable
class SeekableDataset(Protocol):
    """An iterable dataset that can begin at any sample, so that a resumed run skips reading earlier ones."""

    def iterate_from(self, position: int) -> Iterator[Any]:
        """Iterate from sample number `position` on; in a loader's worker, of the worker's own part."""
        ...


def set_epoch_of(source: Any, epoch: int) -> None:
    """Set the epoch of a dataset or sampler that has a `set_epoch`."""
    set_epoch = getattr(source, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


@dataclass(frozen=True, slots=True)
class PaddedSample:
    """The last real sample of a rank in an incomplete round, or a sample that pads it.

    Args:
        real: Number of samples in the round, over all ranks, that are not padding.
        is_padding: Whether the sample is padding.
    """

    sample: Any
    real: int
    is_padding: bool


@dataclass(slots=True)
class BatchWithMeta:
    """A batch with metadata for the loader.

    Args:
        real: The number of its samples that are not padding; `None` for all.
        real_in_step: The number of samples of the round, over all ranks, that are not padding.
        workers: The worker processes that built the batches that it was made of, if not the loader's own.
        read: The number of these batches.
        torchdata: The state of torchdata's loader after it.
    """

    batch: Any
    real: int | None = None
    real_in_step: int | None = None
    workers: tuple[int, ...] = ()
    read: int = 1
    torchdata: dict[str, Any] | None = None

    def pin_memory(self) -> BatchWithMeta:
        """Copy the batch into pinned memory; called by torch's loader."""
        return replace(self, batch=pin_memory(self.batch))


class MetaCollate:
    """A collate function that counts `PaddedSample`s, and returns a `BatchWithMeta`.

    A batch of the loader's own process without a `PaddedSample` is returned as it is.
    """

    def __init__(self, collate: Collate, *, batched: bool = True) -> None:
        self.collate = collate
        self.batched = batched

    def __call__(self, samples: Any) -> Any:
        """Collate the samples of one batch."""
        info = get_worker_info()
        workers = () if info is None else (info.id,)
        last = samples[-1] if self.batched else samples  # a round ends with a batch
        if type(last) is not PaddedSample:
            batch = self.collate(samples)
            return BatchWithMeta(batch, workers=workers) if workers else batch
        if not self.batched:
            # The dataset's items are batches: their number of samples is not known.
            real = 0 if last.is_padding else None
            return BatchWithMeta(self.collate(last.sample), real, workers=workers)
        real = sum(not (type(sample) is PaddedSample and sample.is_padding) for sample in samples)
        plain = [sample.sample if type(sample) is PaddedSample else sample for sample in samples]
        return BatchWithMeta(self.collate(plain), real if real < len(plain) else None, last.real, workers)


_SHARD_OF = (
    ("num_replicas", "rank"),  # torch's DistributedSampler and its like, torchdata's among them
    ("_world_size", "_rank"),  # detectron2
    ("data_parallel_size", "data_parallel_rank"),  # Megatron-LM, NeMo
    ("world_size", "rank"),
)
"""The attributes of samplers and streams with the number of ranks that read, and this rank."""


def is_sharded_already(
    dataloader: DataLoader[Any], *, num_processes: int, process_index: int, asked: bool | None = None
) -> bool:
    """Return whether a loader is already sharded: it yields different samples on each rank.

    Detected are samplers and iterable datasets with the number of ranks and the rank among their attributes
    (`num_replicas` and `rank`, for instance), an `IterableDatasetShard`, iterable datasets returned by
    `datasets.distributed.split_dataset_by_node`, and datasets that read a split of Ray Data
    (`streaming_split`, `ray.train.get_dataset_shard`).

    Args:
        dataloader: The loader.
        num_processes: The number of ranks that share the data.
        process_index: The index of this rank among these ranks.
        asked: The user's answer; `None` to inspect the loader.

    Raises:
        ValueError: The data is sharded for another number of ranks, or for another rank.
    """
    if asked is not None:
        return asked
    if num_processes == 1:
        return False
    dataset: Any = dataloader.dataset
    if not isinstance(dataset, IterableDataset):
        source: Any = dataloader.batch_sampler if dataloader.batch_sampler is not None else dataloader.sampler
        while source is not None:
            if _is_shard(source, num_processes, process_index):
                return True
            source = getattr(source, "batch_sampler", getattr(source, "sampler", None))
        return False
    if isinstance(dataset, IterableDatasetShard):
        return dataset.num_processes > 1
    return (
        getattr(dataset, "_distributed", None)
        is not None  # set by datasets.distributed.split_dataset_by_node
        or _reads_ray_split(dataset)
        or _is_shard(dataset, num_processes, process_index)
    )


def _reads_ray_split(dataset: Any) -> bool:
    """Return whether a dataset reads a split of Ray Data: in an attribute, or for `to_torch` in a closure."""
    values = list(vars(dataset).values())
    closure = getattr(getattr(dataset, "generator_func", None), "__closure__", None) or ()
    values += [cell.cell_contents for cell in closure]
    return any(type(value).__name__ == "StreamSplitDataIterator" for value in values)


def _is_shard(source: Any, num_processes: int, process_index: int) -> bool:
    """Return whether a sampler or dataset is the shard of this rank, by its attributes."""
    for count_name, rank_name in _SHARD_OF:
        count, rank = getattr(source, count_name, None), getattr(source, rank_name, None)
        if not (isinstance(count, int) and isinstance(rank, int)) or count == 1:
            continue
        name, facts = type(source).__qualname__, f"{count_name}={count!r} and {rank_name}={rank!r}"
        if (count, rank) != (num_processes, process_index):
            raise ValueError(
                f"The loader's {name} shards the data with {facts}, but this is rank {process_index!r} of "
                f"{num_processes!r} that read different data. Build it with these numbers, build the "
                "loader without it, or pass already_sharded=True (in DataLoaderConfiguration) to read "
                "the data as it is."
            )
        logger.info(
            "The loader's %s already shards the data (%s): it is not sharded again. If this is wrong, "
            "pass DataLoaderConfiguration(already_sharded=False).",
            *(name, facts),
        )
        return True
    return False
