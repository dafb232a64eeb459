"""Gather the results of real samples, without the padding of the last batch: `gather_for_metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accel_ops import collectives
from accel_ops.tree import recursively_apply, walk
from accel_state.errors import DistributedOperationException


def gather_real(data: Any, loader: Any, *, as_objects: bool = False, repeats: bool | None = None) -> Any:
    """Gather the results for the real (unpadded) samples of a loader's last batch: `gather_for_metrics`.

    Every rank keeps one row per real sample of its batch, and these rows are gathered; ranks may have
    different numbers. Data whose row count differs from the batch size is gathered in full, and cut to
    the number of samples in the last batches of all ranks: Accelerate does that, and
    `transformers.Trainer` relies on it for the weight of the last batch's loss.

    Without an active loader, nothing is removed. If ranks share batches, `repeats` is whether this rank
    has the same samples as another rank, and so contributes nothing.
    """
    # 1. Trim this rank's data to its real samples.
    real, is_padded = _count_real_samples(loader)
    if as_objects or not all(isinstance(leaf, torch.Tensor) for _, leaf in walk(data)):
        return _gather_objects(data, loader, real, is_padded=is_padded, counts=not repeats)
    if real is None and repeats is None:
        return collectives.gather(data)
    is_untrimmed: list[bool] = []  # for each tensor, whether its row count differs from the batch's

    def trim(tensor: torch.Tensor) -> torch.Tensor:
        is_untrimmed.append(real is not None and tensor.dim() > 0 and _has_other_rows(loader, len(tensor)))
        if real is not None and tensor.dim() > 0 and not is_untrimmed[-1]:
            tensor = tensor[:real]
        if repeats is None:
            return tensor
        rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
        return rows[:0] if repeats else rows

    # 2. Gather, and cut the tensors that could not be trimmed before.
    gathered = collectives.gather(recursively_apply(trim, data))
    cuts = iter(is_untrimmed)
    return recursively_apply(lambda tensor: tensor[: loader.remainder] if next(cuts) else tensor, gathered)


def _count_real_samples(loader: Any) -> tuple[int | None, bool]:
    """Return the number of real samples in this rank's batch (None for all), and whether it is padded."""
    if loader is None:
        return None, False
    if loader.real_in_batch is not None:
        return loader.real_in_batch, True
    if not (loader.end_of_dataloader and loader.remainder > 0):
        return None, False
    rows = loader.batch_size_seen
    # A batch may have more rows than samples, such as chosen and rejected answers of preference data.
    return (None if rows is None else min(rows, loader.remainder)), False


def _has_other_rows(loader: Any, rows: int) -> bool:
    """Return whether the number of rows differs from the padded size of the last batch."""
    return loader.remainder > 0 and loader.batch_size_seen not in {None, rows}


def _gather_objects(data: Any, loader: Any, real: int | None, *, is_padded: bool, counts: bool) -> Any:
    # 1. Trim this rank's objects; an error is exchanged, so that every rank raises.
    problem: ValueError | None = None
    has_rows = has_object_per_sample(data)
    is_untrimmed = real is not None and has_rows and _has_other_rows(loader, len(data))
    try:
        if not is_untrimmed and real is not None and (is_padded or has_rows or torch.is_tensor(data)):
            data = trim_objects(data, real=real)
    except ValueError as error:
        problem = error
    contribution = (problem and str(problem), data if counts else None, counts, is_untrimmed)
    # 2. Gather, and raise if any rank has a problem.
    gathered: list[tuple[str | None, Any, bool, bool]] = collectives.gather_object([contribution])
    try:
        if problem is not None:
            raise problem
    finally:
        del problem  # else a cycle: its traceback holds this frame
    for rank, (text, *_) in enumerate(gathered):
        if text is not None:
            raise DistributedOperationException(f"Rank {rank}: {text}")
    # 3. Join the values of the ranks that count.
    if len(gathered) == 1:
        return data[: loader.remainder] if is_untrimmed else data
    values = [value for _, value, counted, _ in gathered if counted]
    if all(isinstance(value, list | tuple) for value in values):
        limit = loader.remainder if any(untrimmed for *_, untrimmed in gathered) else None
        return [item for value in values for item in value][:limit]
    return values if len(values) > 1 else values[0]


def has_object_per_sample(data: object) -> bool:
    """Return whether data is a list of one object per sample, rather than of fields that span all samples.

    Named tuples, tuples of containers, and lists that mix tensors and other objects are fields.

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
    """Cut a list of one object per sample to the real samples.

    Example:
        >>> trim_objects(["a", "b", "a"], real=2)
        ['a', 'b']
    """
    if isinstance(data, torch.Tensor):
        return data if data.dim() == 0 else data[:real]
    if not has_object_per_sample(data):
        raise ValueError(
            f"gather_for_metrics got a {type(data).__qualname__} for a batch that ends in padding, and "
            "cannot remove the padding. Pass a list with one object per sample."
        )
    objects: Sequence[Any] = data
    return objects[:real]
