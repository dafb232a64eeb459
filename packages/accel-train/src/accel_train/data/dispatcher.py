"""Loader of a dataset that only rank 0 reads: it splits the rows of each round and scatters them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel_ops.tree import children, rebuild
from accel_state import runtime
from accel_state.collectives import Collectives
from accel_state.frozen import frozen
from accel_train.data.adapter import (
    END,
    Pass,
    Position,
    PreparedLoader,
    StartCopy,
    T_co,
    on_batch,
)
from accel_train.data.scatter import receive, send
from accel_train.data.shards import BatchWithMeta

SliceFn = Callable[..., Any]


class DataLoaderDispatcher(PreparedLoader[T_co]):
    """A torch loader that reads on the main process, and scatters the batches across ranks.

    For datasets that only one process can read. All processes create it, with the same arguments. A batch is
    sent as one message of bytes to each process.

    Args:
        dataset: The dataset to load; only the main process reads it.
        split_batches: Whether every batch is sharded across ranks; otherwise each gets a full one.
        skip_batches: Number of batches that the first iteration skips; later ones are complete.
        use_stateful_dataloader: Read through torchdata's `StatefulDataLoader`.
        _drop_last: Whether to drop an incomplete last round (one batch for every process).
        _non_blocking: Whether copies of batches to the device are asynchronous.
        slice_fn: Called on the main process as `slice_fn(batch, rows, process_index=..., num_processes=...)`
            with the batches of a round joined into one, and the slice of rows of a process. If `None`, the
            rows are cut out of every tensor, and of every list with one object per sample.
        torch_device_mesh: The device mesh; ranks that differ along some of its axes only have the
            same batches.
        iteration: The first epoch.
        device: The device of batches; the device of this process if `None`.
        even_batches: Whether the last round is completed with its first samples, so that all processes get
            the same number.
        micro_batches: The number of equal parts into which an engine cuts the batch of a process: the last
            round is completed to a multiple of it.
        **kwargs: As for `torch.utils.data.DataLoader`.

    Raises:
        MainProcessReadError: On the other processes, if the main process fails to read.
    """

    _splits_batches = True

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: SliceFn | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        *,
        device: torch.device | str | None = None,
        even_batches: bool = True,
        micro_batches: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dataset,
            use_stateful_dataloader,
            device=runtime.active.device if device is None else device,
            skip_batches=skip_batches,
            torch_device_mesh=torch_device_mesh,
            iteration=iteration,
            _drop_last=_drop_last,
            _non_blocking=_non_blocking,
            **kwargs,
        )
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.micro_batches = micro_batches
        self.slice_fn = slice_fn
        self._reads = self._collectives.rank == 0
        all_ranks = [*range(self._collectives.world_size)]
        self._shard_of = all_ranks if torch_device_mesh is None else shard_of_ranks(torch_device_mesh)
        self._batches_per_step = self._row_split.batches_per_step_all_ranks

    @property
    def _collectives(self) -> Collectives:
        return runtime.active.collectives  # of this process, also in a copy

    @property
    def sharder(self) -> Any:
        """This loader, whose main process splits the batches."""
        return self

    @property
    def is_sharded(self) -> bool:
        """Whether this rank gets only a part of the data."""
        return self._collectives.world_size > 1

    def __len__(self) -> int:
        """Number of batches of this rank, without those that the next iteration skips."""
        length = super().__len__()
        is_even = self.even_batches or self._drop_last or not self.counts_samples
        if is_even or self._stateful is not None:
            return length
        shard: Any = self.index_shard
        samples: Any = self.dataset if shard is None else shard.batch_sampler.sampler
        in_last_step = len(samples) % self.stride
        return max(0, length - (0 < in_last_step <= self._shard_of[self._collectives.rank]))

    @property
    def _row_split(self) -> RowSplit:
        shard = self.index_shard
        return RowSplit(
            num_processes=len(set(self._shard_of)),
            split=self.split_batches,
            even=self.even_batches,
            drop_last=self._drop_last,
            slice_fn=self.slice_fn,
            multiple=self.micro_batches,
            batch_size=self.batch_size if shard is None or shard.single else shard.batch_size,
        )

    def _open(self) -> Pass:
        if self._reads:
            try:
                return super()._open()
            except Exception as error:  # noqa: BLE001 - it must reach the other ranks
                return Pass(_raise(error), Position(unit="remote"))
        if self._resume is None:
            # The torch loader of the main process draws a seed; afterwards generators are equal again.
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=self.generator)
        self._resume, self.skip_batches = None, 0
        return Pass(iter(()), Position(unit="remote"))

    def _pairs(self, reading: Pass, start_copy: StartCopy | None) -> Iterator[tuple[Any, Any]]:
        collectives = self._collectives
        if collectives.world_size == 1:
            parts = (part for (part,) in self._rounds(reading))
            return super()._pairs(replace(reading, batches=parts), start_copy)
        sent = send(self._rounds(reading), collectives) if self._reads else receive(collectives)
        pairs = ((item, END if is_last else None) for item, is_last in sent)
        if start_copy is None:
            return pairs
        started = ((on_batch(start_copy, item), following) for item, following in pairs)
        return (pair for pair, _ in pairwise(chain(started, (END,))))

    def _rounds(self, reading: Pass) -> Iterator[list[BatchWithMeta | None]]:
        """Split the batches that the main process reads; yield the batches of all ranks in each round."""
        split, layout = self._row_split, None
        for items in split.rounds(reading.batches):
            read = [item if type(item) is BatchWithMeta else BatchWithMeta(item) for item in items]
            batches = [loaded.batch for loaded in read]
            layout = split.layout(batches) if layout is None else layout
            parts = split.parts(batches, layout)
            parts = [parts[shard] for shard in self._shard_of]
            if parts[0] is not None:
                workers = tuple(worker for loaded in read for worker in loaded.workers)
                parts[0] = replace(parts[0], workers=workers, read=len(read), torchdata=read[-1].torchdata)
            yield parts


def _raise(error: Exception) -> Iterator[Any]:
    """Raise an error where the first batch would be read."""
    raise error
    yield


SHARED_AXES = frozenset({"tp", "cp", "sp", "pp"})
"""The axes of a mesh along which all ranks have the same batches."""


def shard_of_ranks(mesh: Any) -> list[int]:
    """Return the data shard of every rank of a mesh with named axes.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> ranks = torch.arange(4).reshape(2, 2)
        >>> shard_of_ranks(SimpleNamespace(mesh=ranks, mesh_dim_names=("dp_shard", "tp")))
        [0, 0, 1, 1]
    """
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(f"torch_device_mesh={mesh!r} has no mesh_dim_names to identify its axes.")
    sharded_axes = [axis for axis, name in enumerate(names) if name not in SHARED_AXES]
    shared = [axis for axis, name in enumerate(names) if name in SHARED_AXES]
    groups = mesh.mesh.permute(*sharded_axes, *shared)
    rows = groups.reshape(math.prod(groups.shape[: len(sharded_axes)]), -1).tolist()
    owners = {rank: shard for shard, ranks in enumerate(rows) for rank in ranks}
    return [owners[rank] for rank in range(len(owners))]


@frozen
class RowSplit:
    """Split the batches that rank 0 has read across ranks; see `DataLoaderDispatcher` for the fields.

    With `even`, the rows of every rank are completed to a `multiple`.
    """

    num_processes: int
    split: bool = False
    even: bool = True
    drop_last: bool = False
    slice_fn: SliceFn | None = None
    multiple: int = 1
    batch_size: int | None = None

    @property
    def batches_per_step_all_ranks(self) -> int:
        """Number of batches in a round."""
        return 1 if self.split else self.num_processes

    def rounds(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Group batches into rounds; only the last one may have fewer."""
        while step_batches := list(islice(batches, self.batches_per_step_all_ranks)):
            if len(step_batches) == self.batches_per_step_all_ranks or not self.drop_last:
                yield step_batches

    def layout(self, batches: Sequence[Any]) -> RowLayout:
        """Find where the first batch of an epoch has its rows; it is complete if another one follows."""
        is_complete = self.split or len(batches) > 1
        return row_layout(batches[0], self.batch_size if is_complete else None)

    def parts(self, batches: Sequence[Any], layout: RowLayout | None = None) -> list[BatchWithMeta | None]:
        """Split a round: return the batch of every rank, `None` for ranks without one.

        Args:
            batches: The batches of the round.
            layout: The layout of the epoch's first batch.
        """
        # 1. A complete round of equal batches is unchanged.
        counts = [None] if layout is None else [count_rows(batch, layout) for batch in batches]
        if layout is None or None in counts:  # another structure than before
            layout = row_layout(batches[0])
            counts = [count_rows(batch, layout) for batch in batches]
        can_cut = self.split or self.slice_fn is not None
        rows = (
            None if None in counts or not (layout.is_sure or can_cut) else sum(count or 0 for count in counts)
        )
        full = len(batches) == self.num_processes and len(set(counts)) == 1
        full = full and (not self.even or (counts[0] or 0) % self.multiple == 0)
        if full and not can_cut:
            return [BatchWithMeta(batch, None, rows) for batch in batches]
        # 2. Batches with rows are joined and cut.
        try:
            if not rows:
                raise ValueError("it is not known which of its values have one row per sample")
            return self._slices(map_rows(_join, layout.tree, *batches), layout.tree, rows)
        except ValueError as error:
            if can_cut:
                raise ValueError(f"The main process cannot split the batch that it read: {error}.") from error
        padding = BatchWithMeta(batches[0], 0, rows) if self.even else None  # the first batch pads
        whole = [BatchWithMeta(batch, None, rows) for batch in batches]
        return [*whole, *[padding] * (self.num_processes - len(batches))]

    def _slices(self, batch: Any, tree: Any, rows: int) -> list[BatchWithMeta | None]:
        """Cut a batch into equal slices, padded with the first rows; else of almost equal length."""
        world = self.num_processes
        size, larger = divmod(rows, world)
        padded = self.even and rows % (world * self.multiple) > 0
        if padded:
            size, larger = -(-rows // (world * self.multiple)) * self.multiple, 0
            batch = map_rows(_join, tree, *[batch] * -(-size * world // rows))
            batch = map_rows(lambda values: values[: size * world], tree, batch)
        dealt: list[BatchWithMeta | None] = []
        last = 0
        for rank in range(world):
            own = slice(last, last := last + size + (rank < larger))
            if own.start == last:
                dealt.append(None)
                continue
            if self.slice_fn is None:
                sliced = map_rows(lambda values: values[own], tree, batch)  # noqa: B023 - called at once
            else:
                sliced = self.slice_fn(batch, own, process_index=rank, num_processes=world)
            real = min(max(rows - own.start, 0), last - own.start) if padded else None
            dealt.append(BatchWithMeta(sliced, real, rows))
        return dealt


@frozen
class RowLayout:
    """The values of a batch that have one row per sample.

    Args:
        tree: `True` for a tensor with one row per sample, or a list with one object per sample; `None` for a
            value that belongs to the whole batch; else a list with the trees of a container's values.
        is_sure: Whether no other reading of the batch is as likely.
    """

    tree: Any
    is_sure: bool


def row_layout(batch: Any, batch_size: int | None = None) -> RowLayout:
    """Find the values of a batch that have one row per sample.

    A plain list or tuple is either a list of fields, each with one row per sample, or it has one object per
    sample. Where both fit, it is a list of fields.

    Args:
        batch: The batch.
        batch_size: The number of samples of the batch, if it is known.

    Example:
        >>> row_layout({"images": [torch.zeros(5), torch.zeros(4)], "ids": torch.arange(2), "kind": "x"}).tree
        [True, True, None]
        >>> row_layout([torch.zeros(3, 8), torch.zeros(3)]).tree
        [True, True]
    """
    readings = {rows: _read_as(batch, rows) for rows in _possible_rows(batch)}
    fewest = min((reading.unmatched for reading in readings.values()), default=0)
    best = [rows for rows, reading in readings.items() if reading.unmatched == fewest]
    if not best:
        return RowLayout(tree=None, is_sure=True)
    reading = readings[batch_size if batch_size in best else best[0]]
    return RowLayout(
        tree=reading.tree, is_sure=not reading.has_tie and (len(best) == 1 or batch_size in best)
    )


def _possible_rows(data: Any) -> Iterator[int]:
    """Yield lengths of values in a batch, of which one is the number of samples, likely ones first."""
    inside = children(data)
    if isinstance(data, Tensor):
        yield from data.shape[:1]
    elif type(data) not in {list, tuple}:
        for _, value in inside or ():
            yield from _possible_rows(value)
    elif all(_is_plain(item) for item in data):
        yield len(data)
    else:
        own = [len(data)]
        below = [rows for item in data for rows in _possible_rows(item)]
        has_records = any(type(item) not in {list, tuple} and not isinstance(item, Tensor) for item in data)
        yield from own + below if has_records else below + own


class _Reading(NamedTuple):
    """A batch read as one of some number of samples.

    Args:
        tree: As for `RowLayout`.
        matched: The number of values with one row per sample.
        unmatched: The number of values that have rows, but another number.
        has_tie: Whether a list may be read as fields and as samples.
    """

    tree: Any = None
    matched: int = 0
    unmatched: int = 0
    has_tie: bool = False


def _read_as(data: Any, rows: int) -> _Reading:
    """Read a batch as one of this many samples."""
    if isinstance(data, Tensor) and data.dim() > 0:
        return _Reading(tree=True, matched=1) if len(data) == rows else _Reading(unmatched=1)
    if _is_plain(data) or isinstance(data, Tensor):
        return _Reading()
    below = [_read_as(value, rows) for _, value in children(data) or ()]
    are_samples = False
    if type(data) in {list, tuple}:
        are_fields = bool(below) and all(field.matched and not field.unmatched for field in below)
        are_samples = len(data) == rows and len({_kind(item) for item in data if item is not None}) < 2
        if are_samples and not are_fields:
            return _Reading(tree=True, matched=1)
        if all(_is_plain(item) for item in data):
            return _Reading(unmatched=1)
    return _Reading(
        [field.tree for field in below],
        sum(field.matched for field in below),
        sum(field.unmatched for field in below),
        are_samples or any(field.has_tie for field in below),
    )


def _is_plain(item: Any) -> bool:
    return children(item) is None and not isinstance(item, Tensor)


def _kind(item: Any) -> Any:
    """Return what the objects of all samples have in common."""
    if isinstance(item, Tensor):
        return item.dtype, item.dim()
    return None if _is_plain(item) else type(item)


def count_rows(batch: Any, layout: RowLayout) -> int | None:
    """Return the number of samples in a batch; `None` if it does not fit the layout, or has none.

    Example:
        >>> batch = {"ids": torch.zeros(3, 2), "text": ["a", "b", "c"]}
        >>> count_rows(batch, row_layout(batch))
        3
    """
    lengths = _lengths(batch, layout.tree)
    return lengths.pop() if len(lengths) == 1 else None


def _lengths(data: Any, tree: Any) -> set[int | None]:
    if tree is None:
        return set()
    inside = children(data)
    if tree is True:
        is_list = type(data) in {list, tuple}
        return {len(data) if is_list or (isinstance(data, Tensor) and data.dim() > 0) else None}
    if inside is None or len(inside) != len(tree):
        return {None}
    return set().union(*(_lengths(value, below) for (_, value), below in zip(inside, tree, strict=True)))


def map_rows(function: Callable[..., Any], tree: Any, *batches: Any) -> Any:
    """Apply a function to the values with rows, of all batches at once; others are those of the first batch.

    Example:
        >>> batch = {"ids": torch.arange(3), "text": ["a", "b", "c"]}
        >>> map_rows(lambda values: values[1:], row_layout(batch).tree, batch)
        {'ids': tensor([1, 2]), 'text': ['b', 'c']}
    """
    if tree is None:
        return batches[0]
    if tree is True:
        return function(*batches)
    columns = zip(*([value for _, value in children(batch) or ()] for batch in batches), strict=True)
    below = zip(tree, columns, strict=True)
    return rebuild(batches[0], [map_rows(function, part, *column) for part, column in below])


def _join(*values: Any) -> Any:
    if not isinstance(values[0], Tensor):
        return type(values[0])(chain.from_iterable(values))
    try:
        return values[0] if len(values) == 1 else torch.cat(values)
    except (RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from error
