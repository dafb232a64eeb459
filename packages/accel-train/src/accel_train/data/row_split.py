"""Split what the main process has read: rounds of batches into the rows of every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from accel_ops.tree import children, ignorant_find_batch_size, rebuild
from accel_train.data.iterable_shard import BatchWithMeta

SliceFn = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplit:
    """How batches that the main process has read are split across ranks; see `DataLoaderDispatcher`.

    With `even`, every rank's rows are completed to a `multiple`.
    """

    num_processes: int
    split: bool = False
    even: bool = True
    drop_last: bool = False
    slice_fn: SliceFn | None = None
    multiple: int = 1

    @property
    def batches_per_step_all_ranks(self) -> int:
        """Number of batches that are read for a round."""
        return 1 if self.split else self.num_processes

    def rounds(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Group batches into rounds; only the last one may have fewer."""
        while step_batches := list(islice(batches, self.batches_per_step_all_ranks)):
            if len(step_batches) == self.batches_per_step_all_ranks or not self.drop_last:
                yield step_batches

    def parts(self, batches: Sequence[Any]) -> list[BatchWithMeta | None]:
        """Divide a round: for every rank its part, or None if there is none for it."""
        counts = [count_rows(batch) for batch in batches]
        rows = None if None in counts else sum(count or 0 for count in counts)
        full = len(batches) == self.num_processes and len(set(counts)) == 1
        full = full and (not self.even or (counts[0] or 0) % self.multiple == 0)
        if full and not self.split and self.slice_fn is None:
            return [BatchWithMeta(batch, None, rows) for batch in batches]
        try:
            joined = batches[0] if len(batches) == 1 else join_rows(batches)
            if not rows:
                raise ValueError("nothing in a batch has one row per sample")
        except ValueError as error:
            if self.split or self.slice_fn is not None:
                raise ValueError(f"The main process cannot split what it has read: {error}.") from error
            return self._full_batches(batches, rows)
        return self._slices(joined, rows)

    def _full_batches(self, batches: Sequence[Any], rows: int | None) -> list[BatchWithMeta | None]:
        """Batches that do not fit together are given away as they are."""
        loaded_batches: list[BatchWithMeta | None] = [BatchWithMeta(batch, None, rows) for batch in batches]
        missing = self.num_processes - len(batches)
        return loaded_batches + [
            BatchWithMeta(batches[0], 0, rows) if self.even else None for _ in range(missing)
        ]

    def _slices(self, batch: Any, rows: int) -> list[BatchWithMeta | None]:
        """Equal slices, completed from the first rows or of almost equal length."""
        size, larger = divmod(rows, self.num_processes)
        padded = self.even and rows % (self.num_processes * self.multiple) > 0
        if padded:
            size, larger = -(-rows // (self.num_processes * self.multiple)) * self.multiple, 0
            batch = select_rows(batch, [i % rows for i in range(size * self.num_processes)], rows)
        total = size * self.num_processes if padded else rows
        loaded_batches: list[BatchWithMeta | None] = []
        first = 0
        for rank in range(self.num_processes):
            last = first + size + (rank < larger)
            part = None
            if last > first:
                real = min(max(rows - first, 0), last - first) if padded else None
                part = BatchWithMeta(self._slice(batch, slice(first, last), rank, total), real, rows)
            loaded_batches.append(part)
            first = last
        return loaded_batches

    def _slice(self, batch: Any, rows: slice, rank: int, total: int) -> Any:
        if self.slice_fn is None:
            return select_rows(batch, rows, total)
        return self.slice_fn(batch, rows, process_index=rank, num_processes=self.num_processes)


def count_rows(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if nothing in it tells.

    Example:
        >>> count_rows({"ids": torch.zeros(3, 2), "text": ["a", "b", "c"]}), count_rows(["a", "b"])
        (3, 2)
    """
    if type(batch) is dict and type(first := next(iter(batch.values()), None)) is Tensor and first.dim() > 0:
        return first.shape[0]  # the most common case, at next to no cost
    rows = ignorant_find_batch_size(batch)
    if rows is None and _is_column(batch):
        return len(batch)
    if rows is None:
        found = (count_rows(value) for _, value in children(batch) or ())
        return next((count for count in found if count is not None), None)
    return rows


def select_rows(batch: Any, rows: Sequence[int] | slice, total: int) -> Any:
    """Return some rows of a batch; what does not have a row per sample is kept whole.

    Example:
        >>> select_rows({"ids": torch.arange(3), "text": ["a", "b", "c"]}, [2, 0], 3)
        {'ids': tensor([2, 0]), 'text': ['c', 'a']}
    """
    if isinstance(batch, Tensor):
        fits = batch.dim() > 0 and batch.shape[0] == total
        index = rows if isinstance(rows, slice) else torch.tensor(rows, device=batch.device)
        return batch[index] if fits else batch
    if _is_column(batch) and len(batch) == total:
        return batch[rows] if isinstance(rows, slice) else type(batch)(batch[i] for i in rows)
    inside = children(batch)
    if inside is None:
        return batch
    return rebuild(batch, [select_rows(value, rows, total) for _, value in inside])


def join_rows(batches: Sequence[Any]) -> Any:
    """Put batches of the same structure one after the other; what has no rows is taken from the first.

    Example:
        >>> join_rows([{"ids": torch.arange(2), "text": ["a", "b"]}, {"ids": torch.arange(1), "text": ["c"]}])
        {'ids': tensor([0, 1, 0]), 'text': ['a', 'b', 'c']}
    """
    first = batches[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return first
        try:
            return torch.cat(list(batches))
        except RuntimeError as error:
            raise ValueError(str(error)) from error
    if _is_column(first):
        return type(first)(item for batch in batches for item in batch)
    inside = [children(batch) for batch in batches]
    if inside[0] is None:
        return first
    columns = zip(*(level or () for level in inside), strict=True)
    return rebuild(first, [join_rows([value for _, value in column]) for column in columns])


def _is_column(data: Any) -> bool:
    """Whether this is a plain list (or tuple) of objects that are neither tensors nor containers."""
    return type(data) in {list, tuple} and not any(
        isinstance(item, Tensor | list | tuple | Mapping) for item in data
    )
