"""Shard batches of indices, and samples of iterable datasets, across ranks; detect sharded data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from accel_state.frozen import frozen
from accel_state.torch_private import pin_memory
from accel_train.data.samplers import (
    OrderState,
    SeedableRandomSampler,
    innermost_sampler,
    is_plain_batch_sampler,
    iterate_seeded,
    record_order,
    replace_sampler,
    replay_order,
)

logger = logging.getLogger(__name__)


@frozen
class BatchPlan:
    """The plan that deals the items of an epoch to ranks, in *rounds* of some items for every rank.

    Items are indices or samples; or whole batches, of which every rank gets one in each round, or a part of
    the only one. Round `k` of an epoch that begins at item `start` has the items from `start + k * stride`
    on; rank `r` gets its `r`-th slice.

    Args:
        rows: Number of items of a rank in a complete round.
        drop_last: Drop an incomplete last round.
        pads: Complete the last round with items from the epoch's beginning, so that ranks have the same
            number. Otherwise some ranks may get fewer items, or none.
        counts_samples: Whether items are samples; otherwise full batches.
    """

    num_processes: int = 1
    process_index: int = 0
    rows: int = 1
    drop_last: bool = False
    pads: bool = False
    counts_samples: bool = True

    @property
    def stride(self) -> int:
        """Number of items in a complete round."""
        return self.rows * self.num_processes

    def count(self, total: int) -> int:
        """Return the number of rounds out of `total` items in which this rank gets some."""
        full_rounds, remaining = divmod(total, self.stride)
        has_more = remaining > (0 if self.pads else self.rows * self.process_index)
        return full_rounds + (has_more and not self.drop_last)

    def deal(self, items: Iterable[Any], head: list[Any]) -> Iterator[tuple[list[Any], int, list[Any]]]:
        """Yield this rank's items of each round, the number that is not padding, and those of all ranks.

        Args:
            items: The items of the epoch, or the remaining ones.
            head: The preceding items among those of the first round, to which the rest is appended.

        Example:
            >>> plan = BatchPlan(num_processes=2, process_index=1, rows=3, pads=True)
            >>> [(own, real) for own, real, _ in plan.deal(range(10), [])]
            [([3, 4, 5], 3), ([9, 0, 1], 1)]
        """
        stream, rows, stride = iter(items), self.rows, self.stride
        low = self.process_index * rows
        while in_round := list(islice(stream, stride)):
            if self.drop_last and len(in_round) < stride:
                return
            own = in_round[low : low + rows]
            real = len(own)
            if self.pads and len(head) < stride:
                head += in_round
            if self.pads and real < rows:
                first = max(low - len(in_round), 0)  # items before it pad those of other ranks
                own += [head[index % len(head)] for index in range(first, first + rows - real)]
            if own:
                yield own, real, in_round


def _plan_of(shard: BatchSamplerShard | IterableDatasetShard) -> BatchPlan:
    """Return the plan that deals samples; check its numbers."""
    world, index, size = shard.num_processes, shard.process_index, shard.batch_size
    if not 0 <= index < world:
        raise ValueError(
            f"process_index={index!r} is not one of the num_processes={world!r} processes, counted from 0."
        )
    if shard.split_batches and (size is None or size % world):
        raise ValueError(
            "split_batches=True shards every batch across the processes, but "
            f"batch_size={size!r} is not a round multiple of num_processes={world!r}."
        )
    drop_last = shard.drop_last
    return BatchPlan(
        num_processes=world,
        process_index=index,
        rows=(size or 1) // (world if shard.split_batches else 1),
        drop_last=drop_last,
        pads=shard.even_batches and not drop_last and (world > 1 or shard.static_shapes),
    )


def _open(source: Any, start: int, needed: int) -> tuple[Iterator[Any], list[Any]]:
    """Return the items from `start` on, and the items before it among the first `needed`."""
    kind: Any = type(source)  # of the seedable sampler, a subclass may yield another order than it seeks
    has_own_order = (
        issubclass(kind, SeedableRandomSampler) and kind.__iter__ is not SeedableRandomSampler.__iter__
    )
    if start and not has_own_order and isinstance(source, SeekableDataset):
        return source.iterate_from(start), list(islice(source.iterate_from(0), min(start, needed)))
    stream = iter(source)
    head = list(islice(stream, min(start, needed)))
    return islice(stream, start - len(head), None), head


def _of_batch_sampler(name: str, doc: str, *, default: Any = None) -> Any:
    """Return a property for an attribute of the batch sampler below, whose changes count."""

    def write(self: Any, value: Any) -> None:
        setattr(self.batch_sampler, name, value)

    return property(lambda self: getattr(self.batch_sampler, name, default), write, doc=doc)


class _AroundBatchSampler(BatchSampler):
    """A batch sampler around another one, whose `batch_size`, `drop_last` and `sampler` it has."""

    batch_sampler: Any
    batch_size: Any = _of_batch_sampler("batch_size", "The batch size; `None` if there is none.")
    drop_last: Any = _of_batch_sampler(
        "drop_last", "Whether an incomplete last batch is dropped.", default=False
    )
    sampler: Any = property(
        lambda self: innermost_sampler(self.batch_sampler),
        lambda self, sampler: replace_sampler(self.batch_sampler, sampler),
        doc="The innermost sampler of indices.",
    )

    @property
    def total_length(self) -> int:
        """Number of batches of the batch sampler."""
        return len(self.batch_sampler)


@dataclass(slots=True)
class Draw:
    """An iteration over batches of indices: where it begins, and what is known once it has drawn its order.

    Args:
        start: The position at which it begins.
        order: The state that replays its order; before the first batch, `None` for a new order.
        remainder: Number of samples in the last round: 0 if it is complete, -1 while unknown.
        padded: Index of a padded batch -> number of its real samples.
        padded_rows: Number of samples in padded batches; `None` before there is one, 0 if they have several
            sizes.
    """

    start: int = 0
    order: OrderState | None = None
    remainder: int = -1
    padded: dict[int, int] = field(default_factory=dict[int, int])
    padded_rows: int | None = None


@dataclass(eq=False, repr=False)
class BatchSamplerShard(_AroundBatchSampler):
    """Yield this rank's part of the batches of a batch sampler.

    Args:
        batch_sampler: The batch sampler to shard, or any iterable of lists of indices. Later changes of its
            `batch_size` count.
        num_processes: The number of ranks.
        process_index: This rank.
        split_batches: Shard every batch across ranks; otherwise the ranks get full batches, in turn.
        even_batches: Complete the last round with the first samples, so that all ranks get the same number of
            batches of the same size. For batch samplers without a `batch_size`, full batches are repeated.
        static_shapes: Complete the last round of a single rank, too, for devices that recompile for every
            shape; needs `even_batches`.
        single: Yield the only index of every batch instead of the batch.

    Attributes:
        draw (Draw | None): What an iteration begins with, and records; if `None`, each begins an epoch.
        seeds (list): The seeds of `random`, numpy and torch in epoch 0, if the samplers may draw from them.
        epoch (int): The epoch.

    Raises:
        ValueError: The arguments contradict each other.

    Example:
        >>> batches = BatchSampler(range(10), batch_size=3, drop_last=False)
        >>> [list(BatchSamplerShard(batches, 2, rank)) for rank in (0, 1)]
        [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 0, 1]]]
    """

    batch_sampler: BatchSampler | Sampler[list[int]] | Iterable[list[int]]
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True
    _: KW_ONLY
    static_shapes: bool = False
    single: bool = False
    draw: Draw | None = field(default=None, init=False)
    seeds: list[int] = field(default_factory=list[int], init=False)
    epoch: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        _ = self.plan  # refuses arguments that do not fit together

    @property
    def plan(self) -> BatchPlan:
        """The plan of an epoch, of samples if the position counts them; else of full batches."""
        plan = _plan_of(self)
        if is_plain_batch_sampler(self.batch_sampler):
            return plan
        plan = replace(plan, rows=1, counts_samples=False)
        return replace(plan, num_processes=1, process_index=0) if self.split_batches else plan

    def __len__(self) -> int:
        """Number of batches of this rank."""
        plan, batches = self.plan, cast("Any", self.batch_sampler)
        return plan.count(len(batches.sampler if plan.counts_samples else batches))

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of indices."""
        # Unsharded batches come directly from torch's iterator, without a call per batch.
        batches = chain.from_iterable(self.iterate(self.draw or Draw()))
        return (batch[0] for batch in batches) if self.single else batches

    def iterate(self, draw: Draw) -> Iterator[Iterator[list[int]]]:
        """Draw and record an order; yield one iterator of this rank's batches, then end the epoch."""
        plan, batches = self.plan, cast("Any", self.batch_sampler)
        source, sampler = batches.sampler if plan.counts_samples else batches, innermost_sampler(batches)
        draw.padded.clear()
        if plan.drop_last:
            draw.remainder = 0
        elif plan.counts_samples and isinstance(source, Sized):
            draw.remainder = max(0, len(source) - draw.start) % plan.stride
        with replay_order(sampler, draw.order):  # all random numbers are drawn in here
            if draw.order is None:
                draw.order = record_order(sampler)
                if self.seeds:
                    draw.order["seeds"] = [seed + self.epoch for seed in self.seeds]
            epoch = sampler.epoch if isinstance(sampler, SeedableRandomSampler) else 0
            if "seeds" in draw.order:
                batches = iterate_seeded(self._deal(plan, source, draw), draw.order["seeds"])
            elif self.num_processes == 1 and plan.counts_samples and not plan.pads:
                items, _ = _open(source, draw.start, 0)
                batches = iter(BatchSampler(cast("Any", items), self.batch_size, plan.drop_last))
            else:
                batches = self._deal(plan, source, draw)
            first = list(islice(batches, 1))  # an order drawn lazily is drawn now
        yield chain(first, batches)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.end_epoch(epoch)

    def _deal(self, plan: BatchPlan, source: Any, draw: Draw) -> Iterator[list[int]]:
        """Yield this rank's batches; record the padded ones."""
        items, head = _open(source, draw.start, plan.stride if plan.pads else 0)
        if plan.counts_samples:
            dealt = plan.deal(items, head)
        elif self.num_processes == 1 and not plan.pads:
            yield from items
            return
        elif self.split_batches:
            dealt = self._split(items, head)
        else:
            dealt = self._complete(plan, items, head)
        for number, (batch, real, _) in enumerate(dealt):
            if real != len(batch):
                draw.padded[number] = real
                draw.padded_rows = len(batch) if draw.padded_rows in {None, len(batch)} else 0
            yield batch

    def _split(self, batches: Iterator[Any], head: list[Any]) -> Iterator[tuple[list[int], int, Any]]:
        """Split batches of any length; the first one pads incomplete ones."""
        plan = replace(_plan_of(self), drop_last=False)
        first = list(head[0]) if head else []
        for batch in batches:
            first = first or list(batch)
            rows = max(-(-len(batch) // plan.num_processes), plan.rows)
            yield from replace(plan, rows=rows).deal(batch, [*first])

    def _complete(
        self, plan: BatchPlan, batches: Iterator[Any], head: list[Any]
    ) -> Iterator[tuple[list[int], int, Any]]:
        """Deal full batches; samples of the first round complete the last one if the batch size is known."""
        rows, rank = self.batch_size, self.process_index
        dealt = chain(plan.deal(batches, head), (None,))
        for (own, has_batch, in_round), following in pairwise(cast("Any", dealt)):
            batch = list(own[0])
            real = len(batch) if has_batch else 0
            if following is None and plan.pads and rows is not None and rank >= len(in_round) - 1:
                first = [*chain.from_iterable(head)]
                before = max(0, (rank - len(in_round) + 1) * rows - len(in_round[-1]))
                padding = [first[i % len(first)] for i in range(before, before + rows - real)]
                batch = batch[:real] + padding
            yield batch, real, in_round


def index_options(
    indices: Any, *, collates: bool, split_batches: bool = False, **shards: Any
) -> dict[str, Any]:
    """Return the arguments with which a torch loader reads this rank's part of some indices.

    Args:
        indices: A batch sampler; or a sampler, if the loader does not collate: it then yields the dataset's
            item for each index, or for a full batch of indices.
        collates: Whether the loader collates samples to batches.
        split_batches: As for `BatchSamplerShard`.
        **shards: As for `BatchSamplerShard`.
    """
    single = not collates and not isinstance(indices, BatchSampler)
    shard: Any = BatchSampler(cast("Any", indices), 1, drop_last=False) if single else indices
    if isinstance(shard, BatchSamplerShard) and shard.num_processes == 1 < shards.get("num_processes", 1):
        single, shard = shard.single, shard.batch_sampler
    if not isinstance(shard, BatchSamplerShard):
        shard = BatchSamplerShard(shard, split_batches=split_batches, single=single, **shards)
    return {"batch_sampler": shard} if collates else {"sampler": shard, "batch_size": None}


class SkipBatchSampler(_AroundBatchSampler):
    """The batches of a batch sampler without the first ones.

    Args:
        batch_sampler: Any iterable of lists of indices.
        skip_batches: Number of batches to skip.

    Example:
        >>> list(SkipBatchSampler(BatchSampler(range(7), 3, drop_last=False), 1))
        [[3, 4, 5], [6]]
    """

    def __init__(self, batch_sampler: BatchSampler | Iterable[list[int]], skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = check_count(skip_batches)

    def __len__(self) -> int:
        """Number of remaining batches."""
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the remaining batches."""
        inner = self.batch_sampler
        shard = inner if isinstance(inner, BatchSamplerShard) else BatchSamplerShard(inner)
        return chain.from_iterable(shard.iterate(Draw(self.skip_batches * shard.plan.stride)))


def check_count(batches: int) -> int:
    """Refuse a negative number of batches."""
    if batches < 0:
        raise ValueError(f"The number of batches to skip is {batches!r}, but must not be negative.")
    return batches


Collate = Callable[[Any], Any]


@dataclass(eq=False, repr=False)
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
        static_shapes: As for `BatchSamplerShard`.

    Raises:
        ValueError: With `split_batches`, the batch size is not a multiple of the number of ranks.

    Example:
        >>> shards = [IterableDatasetShard(range(7), 2, num_processes=2, process_index=r) for r in (0, 1)]
        >>> [list(shard) for shard in shards]
        [[0, 1, 4, 5], [2, 3, 6, 0]]
    """

    dataset: Iterable[Any]
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    _: KW_ONLY
    even_batches: bool = True
    mark_padding: bool = False
    starts: tuple[int, ...] = ()
    static_shapes: bool = False

    def __post_init__(self) -> None:
        epoch = torch.tensor(-1, device="cpu")
        self._epoch = epoch.share_memory_()  # so that persistent workers see changes
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

    def __len__(self) -> int:
        """Number of samples of this rank, if the dataset has a length."""
        plan = self.plan
        full_steps, remaining = divmod(len(cast("Sized", self.dataset)), plan.stride)
        if not remaining or plan.drop_last:
            return full_steps * plan.rows
        real = min(max(remaining - plan.process_index * plan.rows, 0), plan.rows)
        return full_steps * plan.rows + (plan.rows if plan.pads else real)

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's samples."""
        plan, info = self.plan, get_worker_info()
        if info is not None and self._epoch >= 0:
            set_epoch_of(self.dataset, self.epoch)
        if not self.starts:  # else the loader has set the generator
            self.seed_with_epoch()
        start = self.starts[0 if info is None else info.id] if self.starts else 0
        for own, real, in_round in plan.deal(*_open(self.dataset, start, plan.stride if plan.pads else 0)):
            samples = own
            if self.mark_padding and len(in_round) < plan.stride:
                first = min(real, len(own) - 1)  # a last real sample is marked, too
                is_padding = real < len(own)
                marked = [PaddedSample(sample, len(in_round), is_padding) for sample in own[first:]]
                samples = own[:first] + marked
            yield from samples

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


@dataclass(eq=False)
class MetaCollate:
    """A collate function that counts `PaddedSample`s, and returns a `BatchWithMeta`.

    A batch of the loader's own process without a `PaddedSample` is returned as it is.
    """

    collate: Collate
    _: KW_ONLY
    batched: bool = True

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


def is_sharded_already(dataloader: DataLoader[Any], *, num_processes: int, process_index: int) -> bool:
    """Return whether a loader yields different samples on each rank already; see `prepare_data_loader`.

    Raises:
        ValueError: The data is sharded for another number of ranks, or for another rank.
    """
    source: Any = dataloader.dataset
    if num_processes == 1:
        return False
    if isinstance(source, IterableDatasetShard):
        return source.num_processes > 1
    if isinstance(source, IterableDataset):
        # Ray Data: the split is an attribute, or for `to_torch` in a closure.
        closure = getattr(getattr(source, "generator_func", None), "__closure__", None) or ()
        values = [*vars(source).values(), *(cell.cell_contents for cell in closure)]
        if any(type(value).__name__ == "StreamSplitDataIterator" for value in values):
            return True
        if getattr(source, "_distributed", None) is not None:  # by datasets' split_dataset_by_node
            return True
    else:
        source = dataloader.sampler if dataloader.batch_sampler is None else dataloader.batch_sampler
    while source is not None:
        for names in _SHARD_OF:
            found = tuple(getattr(source, name, None) for name in names)
            if not all(isinstance(number, int) for number in found) or found[0] == 1:
                continue
            facts = f"{type(source).__qualname__} shards the data with {names[0]}={found[0]!r} and "
            facts += f"{names[1]}={found[1]!r}"
            if found != (num_processes, process_index):
                raise ValueError(
                    f"The loader's {facts}, but this is rank {process_index!r} of {num_processes!r} that "
                    "read different data. Build it with these numbers, build the loader without it, or "
                    "pass already_sharded=True (in DataLoaderConfiguration) to read the data as it is."
                )
            logger.info(
                "The loader's %s: it is not sharded again. If this is wrong, pass "
                "DataLoaderConfiguration(already_sharded=False).",
                facts,
            )
            return True
        is_stream = isinstance(source, IterableDataset)
        source = None if is_stream else getattr(source, "batch_sampler", getattr(source, "sampler", None))
    return False
