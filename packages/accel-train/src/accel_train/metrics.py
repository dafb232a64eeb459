"""Cutting the padding off what a process computed for a batch, before it is gathered."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from accel_ops import collect
from accel_ops.tree import recursively_apply
from accel_state.errors import DistributedOperationException

if TYPE_CHECKING:
    from collections.abc import Sequence


def gather_real(data: Any, loader: Any, *, as_objects: bool = False, repeats: bool | None = None) -> Any:
    """Gather what belongs to the real samples of the batch that a loader yielded last.

    Every rank cuts off its own padding, and what is left is gathered, of whatever lengths.

    Args:
        data: Nested tensors with one row per sample, or a list of one object per sample.
        loader: The active prepared loader, `None` outside of all: then nothing is cut off.
        as_objects: Gather as objects even if there are only tensors.
        repeats: Where ranks share batches, whether this one has only what another has, too, and is left out;
            `None` where each has batches of its own.

    Raises:
        ValueError: There is padding in the batch and no telling what of the data belongs to it.
        DistributedOperationException: That is so on another rank.
    """
    rows, real = (None, None) if loader is None else (loader.batch_size_seen, loader.real_in_batch)
    if as_objects or not all_tensors(data):
        return _gather_objects(data, rows, real, counts=not repeats)
    return _gather_tensors(data, rows, real, repeats)


def _gather_tensors(data: Any, rows: int | None, real: int | None, repeats: bool | None) -> Any:
    try:
        trimmed = data if real is None else trim_tensors(data, rows=rows, real=real)
    except ValueError as error:
        # The others are in a gather already: one that cannot fit theirs ends it on every rank.
        with suppress(DistributedOperationException):
            collect.gather({str(error): torch.empty(0)})
        raise
    if repeats is not None:
        trimmed = recursively_apply(lambda tensor: _rows_of_one(tensor, repeats=repeats), trimmed)
    return collect.gather(trimmed)


def _gather_objects(data: Any, rows: int | None, real: int | None, *, counts: bool) -> Any:
    problem: ValueError | None = None
    try:
        data = data if real is None else trim_objects(data, rows=rows, real=real)
    except ValueError as error:
        problem = error
    mine = (problem and str(problem), data if counts else None, counts)
    everyone: list[tuple[str | None, Any, bool]] = collect.gather_object([mine])
    if problem is not None:
        raise problem
    for rank, (told, _, _) in enumerate(everyone):
        if told is not None:
            raise DistributedOperationException(f"Rank {rank}: {told}")
    shares = [share for _, share, counted in everyone if counted]
    if all(isinstance(share, list | tuple) for share in shares):
        return [one for share in shares for one in share]
    return shares if len(shares) > 1 else shares[0]


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


def trim_tensors(data: Any, *, rows: int | None, real: int) -> Any:
    """Keep what belongs to real samples.

    Args:
        data: Nested tensors with one row per sample of the batch; 0-d ones belong to no sample and stay.
        rows: Number of samples in the batch, padding included; not checked if `None`.
        real: Number of samples at the batch's beginning that are not padding.

    Raises:
        ValueError: A tensor has another number of rows than the batch, so that nobody knows what to cut off.

    Example:
        >>> trim_tensors({"ids": torch.tensor([7, 8, 7])}, rows=3, real=2)
        {'ids': tensor([7, 8])}
    """

    def trim(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 0:
            return tensor
        _check_rows(len(tensor), f"a tensor of shape {tuple(tensor.shape)}", rows, real)
        return tensor[:real]

    return recursively_apply(trim, data)


def trim_objects(data: Any, *, rows: int | None, real: int) -> Any:
    """The same for a list of one object per sample.

    Raises:
        ValueError: It is no list or tuple, or it has another length than the batch.

    Example:
        >>> trim_objects(["a", "b", "a"], rows=3, real=2)
        ['a', 'b']
    """
    if isinstance(data, torch.Tensor):
        return trim_tensors(data, rows=rows, real=real)
    if not isinstance(data, list | tuple):
        raise ValueError(
            f"gather_for_metrics got a {type(data).__qualname__} for a batch that ends in padding, and "
            "cannot cut the padding off; give a list with one object per sample."
        )
    objects: Sequence[Any] = data
    _check_rows(len(objects), f"{len(objects)} objects", rows, real)
    return objects[:real]


def _check_rows(found: int, what: str, rows: int | None, real: int) -> None:
    if rows is not None and rows not in {found, real}:
        raise ValueError(
            f"gather_for_metrics got {what} for a batch of {rows} samples, {rows - real} of them padding, "
            f"and cannot tell what belongs to the padding. Give one row per sample, or cut it to the first "
            f"{real} samples of the batch yourself and use gather()."
        )
