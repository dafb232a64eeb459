"""Split what the main process has read: rounds of batches into one shard for every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accel_train.data.iterable_shard import BatchWithMeta
from accel_train.data.rows import count_rows, join_rows, select_rows

SliceFn = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSplit:
    """How batches that the main process has read are split across ranks.

    Args:
        num_processes: The number of ranks.
        split: Every batch is split; otherwise every rank gets a whole one.
        even: Complete the last round with rows from its beginning, so that all ranks get equally many.
        drop_last: Leave the last round out if it is not complete.
        slice_fn: Called as `slice_fn(batch, rows, process_index=..., num_processes=...)` with the whole round
            and a slice of its rows, for every rank; None for the rows themselves.
    """

    num_processes: int
    split: bool = False
    even: bool = True
    drop_last: bool = False
    slice_fn: SliceFn | None = None

    @property
    def batches_per_step_all_ranks(self) -> int:
        """Number of batches that are read for a round."""
        return 1 if self.split else self.num_processes

    def rounds(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """Group batches into rounds; only the last one may have fewer.

        Args:
            batches: What is read.
        """
        while step_batches := list(islice(batches, self.batches_per_step_all_ranks)):
            if len(step_batches) == self.batches_per_step_all_ranks or not self.drop_last:
                yield step_batches

    def parts(self, batches: Sequence[Any]) -> list[BatchWithMeta | None]:
        """Divide a round.

        Args:
            batches: What was read for it.

        Returns:
            For every rank its part, or None if there is none for it.

        Raises:
            ValueError: A batch is to be split in which nothing tells the samples apart.
        """
        counts = [count_rows(batch) for batch in batches]
        rows = None if None in counts else sum(count or 0 for count in counts)
        full = len(batches) == self.num_processes and len(set(counts)) == 1
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
        padded = self.even and larger > 0
        if padded:
            size, larger = size + 1, 0
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
