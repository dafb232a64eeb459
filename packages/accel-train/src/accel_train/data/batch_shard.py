"""Which rank gets which batches of a batch sampler: the plan, and the batch sampler that follows it."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

from torch.utils.data import BatchSampler, Sampler

from accel_train.data.samplers import (
    OrderState,
    SeedableRandomSampler,
    drawn,
    indices_from,
    innermost_sampler,
    is_plain_batch_sampler,
    known_order,
    record_order,
    replay_order,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """How an epoch is cut into *rounds*, one batch for every rank in each, ranks in order.

    Round `k` of an epoch that begins at sample `start` is made of the samples `start + k * stride` and
    following; rank `r` gets the `r`-th part of it.

    Args:
        batch_size: Size of the batches that are sharded: a rank's own, or with `split` the global one. None
            where it is not known.
        split: A round is one batch, of which every rank gets a part; else as many batches as ranks.
        even: Complete the last round with samples from the epoch's beginning, for the ranks to have equally
            many batches of one size; with whole batches from there where the size is not known. Otherwise
            some ranks may get a shorter last batch, or one batch less.
        static_shapes: Complete the last batch where there is only one rank, too, for devices that compile
            anew for every shape; needs `even`.
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
                f"num_processes={self.num_processes!r} processes, which count from 0."
            )
        if self.split and (self.batch_size or 0) % self.num_processes:
            raise ValueError(
                "split_batches=True shards every batch across the processes, but "
                f"batch_size={self.batch_size!r} is not a multiple of num_processes={self.num_processes!r}."
            )

    @property
    def rows(self) -> int:
        """Number of samples in a batch of one rank; 1 where it is not known."""
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
        """Whether a last round that is not complete gets samples from the epoch's beginning."""
        return self.even and not self.drop_last and (self.num_processes > 1 or self.static_shapes)

    def count(self, total: int) -> int:
        """Return how many batches this rank gets out of `total` samples."""
        full_steps, rest = divmod(total, self.stride)
        return full_steps + (
            not self.drop_last and rest > 0 and (self.even or rest > self.rows * self.process_index)
        )

    def spans(self, total: int, start: int = 0) -> Iterator[tuple[int, int]]:
        """Return this rank's batches as spans of positions in the order of the epoch.

        Yields:
            `(first, last)`: a batch has the samples `first … last - 1`. Positions from `total` on are
            padding: sample `total + i` is sample `i % total` again.

        Example:
            >>> list(ShardPlan(num_processes=2, process_index=1, batch_size=3).spans(10))
            [(3, 6), (9, 12)]
        """
        first = start + self.process_index * self.rows
        for _ in range(self.count(max(0, total - start))):
            last = first + self.rows
            yield first, last if self.pads else min(last, total)
            first += self.stride

    def count_batches(self, batches: int) -> int:
        """Return how many batches this rank gets out of `batches` whole ones."""
        full_steps, rest = divmod(batches, self.batches_per_step_all_ranks)
        return full_steps + (not self.drop_last and rest > 0 and (self.even or rest > self.process_index))

    def assign(
        self, batches: Iterable[Sequence[int]], head: Iterable[Sequence[int]] = ()
    ) -> Iterator[tuple[list[int], int]]:
        """Return this rank's batches out of a stream of batches of whatever length.

        Args:
            batches: The batches of the epoch, or of the rest of it.
            head: The batches of the epoch before these, as far as they are needed to pad with.

        Yields:
            A batch, and how many of its samples (the first ones) are not padding.
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
        """Whether more batches than these, from the epoch's beginning, may be needed to pad with."""
        return len(seen) < self.num_processes or sum(map(len, seen)) < self.stride

    def _local_indices(self, step_batches: list[Sequence[int]]) -> list[int]:
        """This rank's part of a round, as far as there is one."""
        if not self.split:
            return list(step_batches[self.process_index]) if self.process_index < len(step_batches) else []
        rows = self._rows_of(step_batches[0])
        return list(step_batches[0][self.process_index * rows : (self.process_index + 1) * rows])

    def _rows_of(self, batch: Sequence[int]) -> int:
        """How many samples of a batch that is split each rank gets; custom samplers may exceed their size."""
        return max(-(-len(batch) // self.num_processes), 0 if self.batch_size is None else self.rows)

    def _padding(
        self, step_batches: list[Sequence[int]], local: list[int], seen: list[Sequence[int]]
    ) -> list[int]:
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


class BatchSamplerShard(BatchSampler):
    """Yield this rank's part of the batches of a batch sampler.

    Args:
        batch_sampler: The batch sampler to shard; any iterable of lists of indices will do.
        num_processes: The number of ranks.
        process_index: This rank.
        split_batches: Shard every batch across ranks; otherwise the ranks get full batches, one after the
            other.
        even_batches: Where the samples run out before every rank has a whole batch, begin again with the
            first ones, so that all ranks get equally many batches of the same size. Of batch samplers
            without a `batch_size`, whole batches are repeated.
        static_shapes: As for `ShardPlan`.

    Raises:
        ValueError: The arguments do not fit together.

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
    ) -> None:
        self.batch_sampler: Any = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.static_shapes = static_shapes
        _ = self.plan  # refuses what does not fit together
        self.padded: dict[int, int] = {}
        """Of the iteration begun last: number of a padded batch -> how many of its samples are real."""
        self.padded_rows: int | None = None
        """Number of samples in the padded batches; None before there is one, 0 if they have several sizes."""
        self.order: OrderState | None = None
        """Of the iteration begun last: what replays its order."""
        self.replays: OrderState | None = None
        """The order of the iteration that begins next, where none is given."""

    @property
    def plan(self) -> ShardPlan:
        """How an epoch is sharded; `even_batches` may be changed between epochs."""
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
    def sampler(self) -> Any:
        """The sampler of indices below."""
        return innermost_sampler(self.batch_sampler)

    @property
    def total_length(self) -> int:
        """Number of batches of the sharded batch sampler."""
        return len(self.batch_sampler)

    @property
    def counts_samples(self) -> bool:
        """Whether positions in the epoch are numbers of samples; otherwise of whole batches."""
        return is_plain_batch_sampler(self.batch_sampler)

    @property
    def unit(self) -> str:
        """What positions are numbers of: `"samples"` or whole `"batches"`."""
        return "samples" if self.counts_samples else "batches"

    @property
    def stride(self) -> int:
        """By how much one batch on every rank moves the position forward."""
        return self.plan.stride if self.counts_samples else self.plan.batches_per_step_all_ranks

    def __len__(self) -> int:
        """Number of batches of this rank."""
        return self.length_from(0)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's batches of indices."""
        return self.iterate_from(0)

    def length_from(self, position: int) -> int:
        """Return how many batches this rank gets after a position.

        Args:
            position: Samples (or whole batches, see `counts_samples`) already consumed by all ranks together.
        """
        if self.counts_samples:
            return self.plan.count(max(0, len(self.batch_sampler.sampler) - position))
        return self.plan.count_batches(max(0, len(self.batch_sampler) - position))

    def remainder_from(self, position: int) -> int:
        """Return how many samples the last round after a position has: 0 for a complete one, -1 if not known.

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
            order: What replays the order of the epoch, or None for `replays`, or whatever comes.
        """
        # What is not sharded comes from torch's own iterator, with no call of ours per batch.
        return chain.from_iterable(self._epoch_from(position, order))

    def _epoch_from(self, position: int, order: OrderState | None) -> Iterator[Iterator[list[int]]]:
        """Draw the epoch; yield its batches after a position, all at once, and end it."""
        if order is None:
            order, self.replays = self.replays, None
        self.padded, self.padded_rows = {}, None
        sampler, plan = self.sampler, self.plan
        with replay_order(sampler, order):  # whatever is random is drawn inside
            self.order = record_order(sampler) if order is None else order
            known = known_order(sampler) if self.counts_samples else None
            epoch = sampler.epoch if isinstance(sampler, SeedableRandomSampler) else 0
            if plan.num_processes == 1 and not plan.pads:
                batches, _ = self._rest(position, known)
            elif known is not None:
                batches = self._noting_padding(_cut(known, plan.spans(len(known), position)))
            else:
                batches = self._noting_padding(plan.assign(*self._rest(position, known)))
        yield batches
        if isinstance(sampler, SeedableRandomSampler):
            sampler.end_epoch(epoch)

    def _noting_padding(self, parts: Iterable[tuple[list[int], int]]) -> Iterator[list[int]]:
        """The batches of these pairs; those with fewer real samples are put into `padded`."""
        padded = self.padded
        for number, (batch, real) in enumerate(parts):
            if real != len(batch):
                padded[number] = real
                self.padded_rows = len(batch) if self.padded_rows in {None, len(batch)} else 0
            yield batch

    def _rest(
        self, position: int, known: Sequence[int] | None
    ) -> tuple[Iterator[list[int]], list[list[int]]]:
        """The batches of all ranks after a position, and the batches before it that padding may need."""
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


class EpochRest(BatchSampler):
    """The batches of a shard after a position.

    Args:
        position: Samples (or whole batches) already consumed by all ranks together.
        order: What replays the order of the epoch, or None for whatever comes.
        single: Yield the one index of every batch instead of the batch.
    """

    def __init__(
        self,
        shard: BatchSamplerShard,
        position: int = 0,
        order: OrderState | None = None,
        *,
        single: bool = False,
    ) -> None:
        self.batch_sampler = shard
        self.batch_size: Any = shard.batch_size
        self.drop_last = shard.drop_last
        self.position = position
        self.order = order
        self.single = single

    def __len__(self) -> int:
        """Number of batches left."""
        return self.batch_sampler.length_from(self.position)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches left."""
        batches = self.batch_sampler.iterate_from(self.position, self.order)
        return (batch[0] for batch in batches) if self.single else batches


def _cut(order: Sequence[int], spans: Iterable[tuple[int, int]]) -> Iterator[tuple[list[int], int]]:
    total = len(order)
    for first, last in spans:
        batch = list(order[first:last])
        yield batch + [order[i % total] for i in range(max(first, total), last)], len(batch)
