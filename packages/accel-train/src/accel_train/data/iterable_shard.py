"""Which rank gets which samples of an iterable dataset, and how a loader learns which of them are padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils.pin_memory import pin_memory

from accel_train.data.batch_shard import ShardPlan

Collate = Callable[[Any], Any]


@runtime_checkable
class SeekableDataset(Protocol):
    """An iterable dataset that can begin anywhere, so that a resumed run does not read what it skips."""

    def iterate_from(self, position: int) -> Iterator[Any]:
        """Iterate from sample number `position` on; in a loader's worker, of that worker's part."""
        ...


def set_epoch_of(source: Any, epoch: int) -> None:
    """Set the epoch of a dataset or sampler, where its order depends on one."""
    set_epoch = getattr(source, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


@dataclass(frozen=True, slots=True)
class PaddedSample:
    """The last sample of a rank in an incomplete round, with those that pad it.

    Args:
        real: Number of samples in the round, over all ranks, that are not padding.
        is_padding: Whether it stands for a missing one.
    """

    sample: Any
    real: int
    is_padding: bool


@dataclass(slots=True)
class BatchWithMeta:
    """A batch with what the loader needs to know about it.

    Args:
        real: How many of its samples are not padding; None for all.
        real_in_step: The same over all ranks, where `real` is given.
        worker: The worker process that made it, or None for the loader's own.
    """

    batch: Any
    real: int | None = None
    real_in_step: int | None = None
    worker: int | None = None

    def pin_memory(self) -> BatchWithMeta:
        """Copy the batch into pinned memory; called by torch's loader."""
        return replace(self, batch=pin_memory(self.batch))


class MetaCollate:
    """A collate function that looks for `PaddedSample`s, and returns batches with what the loader must know.

    A batch without marks from the loader's own process is passed as it is.
    """

    def __init__(self, collate: Collate, *, batched: bool = True) -> None:
        self.collate = collate
        self.batched = batched

    def __call__(self, samples: Any) -> Any:
        """Collate the samples of one batch."""
        info = get_worker_info()
        worker = None if info is None else info.id
        last = samples[-1] if self.batched else samples  # the end of a round is the end of a batch
        if type(last) is not PaddedSample:
            batch = self.collate(samples)
            return batch if worker is None else BatchWithMeta(batch, worker=worker)
        if not self.batched:
            return BatchWithMeta(self.collate(last.sample), 0 if last.is_padding else None, last.real, worker)
        real = sum(not (type(sample) is PaddedSample and sample.is_padding) for sample in samples)
        plain = [sample.sample if type(sample) is PaddedSample else sample for sample in samples]
        return BatchWithMeta(self.collate(plain), real if real < len(plain) else None, last.real, worker)


class IterableDatasetShard(IterableDataset[Any]):
    """Yield this rank's samples of an iterable dataset, all of which is read by every rank.

    The samples are taken in rounds of one batch for every rank; see `ShardPlan`.

    Args:
        dataset: The dataset to shard. It has to give the same samples in the same order on every rank. One
            that shuffles has a `set_epoch` method, or draws from a `torch.Generator` in its attribute
            `generator`, which is seeded with the epoch.
        batch_size: Size of a batch of one rank, or with `split_batches` of all ranks together.
        drop_last: Leave out the last round if it is not complete; otherwise complete it with samples from the
            beginning.
        num_processes: The number of ranks.
        process_index: This rank.
        split_batches: Whether `batch_size` counts the samples of all ranks.
        even_batches: Whether to complete the last round; otherwise some ranks may get less of it.
        mark_padding: Yield what completes a round as `PaddedSample`, for `MetaCollate`.
        starts: How many samples of the epoch are already consumed, for every worker of the loader.
        static_shapes: As for `ShardPlan`.

    Raises:
        ValueError: `split_batches` is asked for with a batch size that does not divide.

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
        self._epoch = torch.tensor(-1).share_memory_()  # workers that live on see it change
        _ = self.plan  # refuses what does not fit together

    @property
    def plan(self) -> ShardPlan:
        """How the samples are sharded."""
        return ShardPlan(
            num_processes=self.num_processes,
            process_index=self.process_index,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            split=self.split_batches,
            even=self.even_batches,
            static_shapes=self.static_shapes,
        )

    @property
    def epoch(self) -> int:
        """The epoch that was set last, 0 at first."""
        return max(0, int(self._epoch))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose samples come next, here, in the dataset, and in workers that live on."""
        self._epoch.fill_(epoch)
        set_epoch_of(self.dataset, epoch)

    def starting_at(self, starts: tuple[int, ...]) -> IterableDatasetShard:
        """Return the same samples without those that are already consumed, for every worker of the loader."""
        rest = copy(self)
        rest.starts = starts
        return rest

    def __len__(self) -> int:
        """Number of samples of this rank, if the dataset has a length."""
        plan = self.plan
        full_steps, rest = divmod(len(self.dataset), plan.stride)
        if not rest or plan.drop_last:
            return full_steps * plan.rows
        low = plan.process_index * plan.rows
        return full_steps * plan.rows + (plan.rows if plan.pads else min(max(rest - low, 0), plan.rows))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples."""
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
        real = step_samples[low:high]
        padding: list[Any] = []
        if plan.pads:
            head += step_samples
            first = max(low - len(step_samples), 0)  # what comes before it pads the parts of other ranks
            padding = [head[index % len(head)] for index in range(first, first + plan.rows - len(real))]
        yield from self._marked(real, padding, len(step_samples)) if self.mark_padding else real + padding

    def _marked(self, real: list[Any], padding: list[Any], real_in_step: int) -> Iterator[Any]:
        if real and not padding:
            real[-1] = PaddedSample(real[-1], real_in_step, is_padding=False)
        yield from real
        for sample in padding:
            yield PaddedSample(sample, real_in_step, is_padding=True)

    def _open(self, start: int, needed: int) -> tuple[Iterator[Any], list[Any]]:
        """The samples from `start` on, and the first `needed` ones as far as they come before."""
        if start and isinstance(self.dataset, SeekableDataset):
            head = list(islice(self.dataset.iterate_from(0), min(start, needed)))
            return self.dataset.iterate_from(start), head
        stream = iter(self.dataset)
        head = list(islice(stream, min(start, needed)))
        return islice(stream, start - len(head), None), head

    def _follow_epoch(self, *, in_worker: bool) -> None:
        if getattr(self.dataset, "set_epoch", None) is not None:
            if in_worker and self._epoch >= 0:
                set_epoch_of(self.dataset, self.epoch)
            return
        generator = getattr(self.dataset, "generator", None)
        alone = self.static_shapes and self.num_processes == 1  # then the order is the dataset's own
        if isinstance(generator, torch.Generator) and not alone:
            generator.manual_seed(self.epoch)
