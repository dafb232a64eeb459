"""Rows of collated batches: counting, cutting and joining them, lists of objects included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from accel_ops.tree import children, ignorant_find_batch_size, rebuild


def count_rows(batch: Any) -> int | None:
    """Return the number of samples in a batch, or None if nothing in it tells.

    Args:
        batch: Nested tensors, and lists with one object per sample.

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

    Args:
        batch: Nested tensors, and lists with one object per sample.
        rows: Which ones, in this order.
        total: How many rows the batch has.

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

    Args:
        batches: At least one.

    Raises:
        ValueError: Their tensors do not fit together.

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
