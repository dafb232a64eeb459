"""Gather the results of a batch without those of its padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_ops import collect
from accel_ops.tree import recursively_apply
from accel_state.errors import DistributedOperationException

if TYPE_CHECKING:
    from collections.abc import Sequence


def gather_real(data: Any, loader: Any, *, as_objects: bool = False, repeats: bool | None = None) -> Any:
    """Gather the results for the real samples of the last batch of a loader, as `gather_for_metrics`.

    Every rank keeps as many rows as it has real samples in the batch, and what is left is gathered, of
    whatever lengths. Data with another number of rows than the batch has is gathered whole, and as many rows
    are kept as there are samples in the last batches together: Accelerate does that, and
    `transformers.Trainer` relies on it for the weight of the last batch's loss.

    Without an active loader nothing is cut off. Where ranks share batches, `repeats` says whether this one
    has only what another has, too, and is left out.
    """
    real, is_padded = _real_samples(loader)
    if as_objects or not all_tensors(data):
        return _gather_objects(data, loader, real, is_padded=is_padded, counts=not repeats)
    others: list[bool] = []

    def trim(tensor: torch.Tensor) -> torch.Tensor:
        others.append(real is not None and tensor.dim() > 0 and _has_other_rows(loader, len(tensor)))
        return tensor if others[-1] or real is None else trim_tensors(tensor, real=real)

    trimmed = recursively_apply(trim, data)
    if repeats is not None:
        trimmed = recursively_apply(lambda tensor: _rows_of_one(tensor, repeats=repeats), trimmed)
    gathered = collect.gather(trimmed)
    if not any(others):
        return gathered
    is_other = iter(others)
    return recursively_apply(
        lambda tensor: tensor[: loader.remainder] if next(is_other) else tensor, gathered
    )


def _has_other_rows(loader: Any, rows: int) -> bool:
    """Whether data of the last batch has not one row for each of the rank's samples, padding included."""
    return loader.remainder > 0 and loader.batch_size_seen not in {None, rows}


def _real_samples(loader: Any) -> tuple[int | None, bool]:
    """Return the number of real samples of this rank's batch, None for all, and whether it has padding."""
    if loader is None:
        return None, False
    if loader.real_in_batch is not None:
        return loader.real_in_batch, True
    if not (loader.end_of_dataloader and loader.remainder > 0):
        return None, False
    rows = loader.batch_size_seen
    # A batch may have more rows than samples, such as the two answers of a preference.
    return (None if rows is None else min(rows, loader.remainder)), False


def _gather_objects(data: Any, loader: Any, real: int | None, *, is_padded: bool, counts: bool) -> Any:
    problem: ValueError | None = None
    is_rows = has_object_per_sample(data)
    is_other = real is not None and is_rows and _has_other_rows(loader, len(data))
    try:
        if not is_other and real is not None and (is_padded or is_rows or isinstance(data, torch.Tensor)):
            data = trim_objects(data, real=real)
    except ValueError as error:
        problem = error
    mine = (problem and str(problem), data if counts else None, counts, is_other)
    all_ranks: list[tuple[str | None, Any, bool, bool]] = collect.gather_object([mine])
    if problem is not None:
        raise problem
    for rank, (text, *_) in enumerate(all_ranks):
        if text is not None:
            raise DistributedOperationException(f"Rank {rank}: {text}")
    if len(all_ranks) == 1:
        return data[: loader.remainder] if is_other else data
    values = [value for _, value, counted, _ in all_ranks if counted]
    if all(isinstance(value, list | tuple) for value in values):
        limit = loader.remainder if any(other for *_, other in all_ranks) else None
        return [one for value in values for one in value][:limit]
    return values if len(values) > 1 else values[0]


def _rows_of_one(tensor: torch.Tensor, *, repeats: bool) -> torch.Tensor:
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    return rows[:0] if repeats else rows


def all_tensors(data: object) -> bool:
    """Whether nested data consists of tensors only.

    Example:
        >>> all_tensors({"loss": torch.ones(())}), all_tensors([torch.ones(1), "text"])
        (True, False)
    """
    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return False
    return True


def trim_tensors(data: Any, *, real: int) -> Any:
    """Keep the rows of real samples.

    Example:
        >>> trim_tensors({"ids": torch.tensor([7, 8, 7])}, real=2)
        {'ids': tensor([7, 8])}
    """
    return recursively_apply(lambda tensor: tensor if tensor.dim() == 0 else tensor[:real], data)


def has_object_per_sample(data: object) -> bool:
    """Whether these are the objects of samples, and no fields, each for all samples.

    Fields are those of a named tuple, of a tuple of containers, and of a list of tensors and other things.

    Example:
        >>> has_object_per_sample([[3, 4], [5]]), has_object_per_sample(("a", "b"))
        (True, True)
        >>> has_object_per_sample((["a", "b"], [1, 2])), has_object_per_sample([torch.ones(2), ["a", "b"]])
        (False, False)
    """
    if isinstance(data, list):
        items: list[Any] = data
        return len({isinstance(item, torch.Tensor) for item in items}) < 2
    if type(data) is not tuple:
        return False
    fields: tuple[Any, ...] = data
    return not any(isinstance(field, torch.Tensor | list | tuple | Mapping) for field in fields)


def trim_objects(data: Any, *, real: int) -> Any:
    """Keep the real samples of a list of one object per sample.

    Example:
        >>> trim_objects(["a", "b", "a"], real=2)
        ['a', 'b']
    """
    if isinstance(data, torch.Tensor):
        return trim_tensors(data, real=real)
    if not has_object_per_sample(data):
        raise ValueError(
            f"gather_for_metrics got a {type(data).__qualname__} for a batch that ends in padding, and "
            "cannot cut the padding off; give a list with one object per sample."
        )
    objects: Sequence[Any] = data
    return objects[:real]
