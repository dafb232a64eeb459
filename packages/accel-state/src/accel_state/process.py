"""Run code on selected ranks; split inputs across ranks."""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

P = ParamSpec("P")
R = TypeVar("R")


def only_if(condition: bool, function: Callable[P, R]) -> Callable[P, R | None]:
    """Return the function itself, or one of the same name that does nothing.

    Example:
        >>> only_if(False, len)([1, 2]) is None
        True
    """
    if condition:
        return function

    @functools.wraps(function)
    def noop(*args: P.args, **kwargs: P.kwargs) -> None:
        del args, kwargs

    return noop


@contextmanager
def goes_first(first: bool, barrier: Callable[[], None]) -> Generator[None]:
    """Run the block on some ranks first, then on the others.

    Args:
        first: Whether this rank is one of the first.
        barrier: Waits for all ranks. Called exactly once on each, also when the block raises, so that
            an error in the first does not leave the others waiting.
    """
    if not first:
        barrier()
    try:
        yield
    finally:
        if first:
            barrier()


def shard_bounds(length: int, num_shards: int, index: int) -> tuple[int, int]:
    """Return where one shard of a sequence begins and ends; the first shards may be one longer.

    Example:
        >>> [shard_bounds(5, 3, i) for i in range(3)]
        [(0, 2), (2, 4), (4, 5)]
    """
    size, longer = divmod(length, num_shards)
    begin = index * size + min(index, longer)
    return begin, begin + size + (index < longer)


def shard_inputs(inputs: Any, num_shards: int, index: int, *, apply_padding: bool = False) -> Any:
    """Return one rank's shard of some data.

    Raises:
        ValueError: The values of a dict are not equally long.
        TypeError: `inputs` has another type.

    Example:
        >>> shard_inputs({"a": [1, 2, 3], "b": (4, 5, 6)}, 2, 1, apply_padding=True)
        {'a': [3, 3], 'b': (6, 6)}
    """
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"The values of a dict that is split between processes must be equally long; found {lengths}."
            )
        return {
            key: shard_inputs(value, num_shards, index, apply_padding=apply_padding)
            for key, value in inputs.items()
        }
    if not isinstance(inputs, (list, tuple, torch.Tensor, np.ndarray)) and not _is_dataset(inputs):
        raise TypeError(
            f"Cannot split a {type(inputs).__name__} between processes: give a list, a tuple, a tensor, a "
            "numpy array, a datasets.Dataset, or a dict of these."
        )
    length = len(inputs)
    begin, end = shard_bounds(length, num_shards, index)
    missing = -(-length // num_shards) - (end - begin) if apply_padding and length else 0
    return _slice_padded(inputs, begin, end, missing)


def _slice_padded(inputs: Any, begin: int, end: int, missing: int) -> Any:
    """Return items `begin` to `end`, padded with `missing` copies of the last item of all."""
    if _is_dataset(inputs):
        return inputs.select([*range(begin, end), *[len(inputs) - 1] * missing])
    shard, last = inputs[begin:end], inputs[-1:]
    if missing == 0:
        return shard
    if isinstance(inputs, torch.Tensor):
        return torch.cat([shard, *[last] * missing])
    if isinstance(inputs, np.ndarray):
        return np.concatenate([shard, *[last] * missing])
    return shard + last * missing


def _is_dataset(inputs: Any) -> bool:
    """Return whether this is a `datasets.Dataset`, without importing that package."""
    return any(
        base.__name__ == "Dataset" and base.__module__.partition(".")[0] == "datasets"
        for base in type(inputs).__mro__
    )
