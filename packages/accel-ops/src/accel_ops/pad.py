"""Pad tensors to the same size on all ranks, or to a multiple of their number."""

from __future__ import annotations

import warnings
from operator import itemgetter
from typing import TypeVar

import torch

from accel_ops.tree import recursively_apply, stray_leaf, walk
from accel_state import runtime
from accel_state.collectives import agree

T = TypeVar("T")


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor cannot be padded and stays unchanged."""


def pad_across_processes(tensor: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> T:
    """Pad every tensor of nested data to its largest size over all ranks.

    The sizes of all leaves are gathered together, unless no leaf has the dimension.

    Args:
        tensor: Tensors nested in containers, of the same structure on every process.
        dim: The dimension to pad. Tensors without it stay unchanged.
        pad_index: The fill value.
        pad_first: Pad in front.

    Returns:
        The same structure; a tensor that is long enough is returned unchanged.

    Raises:
        TypeError: A leaf is not a tensor.
        DistributedOperationException: The processes have different numbers of leaves, or a leaf has
            different numbers of dimensions or dtypes; every process raises it. A process without tensors to
            pad raises it in the next collective.

    Warns:
        CannotPadNestedTensorWarning: There are nested tensors, which stay unchanged.

    Example:
        >>> pad_across_processes(torch.ones(2))
        tensor([1., 1.])
    """
    collectives = runtime.active.collectives
    leaves = list(walk(tensor))
    if not all(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
        raise stray_leaf(tensor, "pad_across_processes")
    if any(leaf.is_nested for _, leaf in leaves):
        warnings.warn(
            "A nested tensor cannot be padded across processes and stays unchanged.",
            CannotPadNestedTensorWarning,
            stacklevel=2,
        )
    if collectives.world_size == 1 or not any(_has(leaf, dim) for _, leaf in leaves):
        return tensor
    in_order = sorted(leaves, key=itemgetter(0))
    facts = {path: f"{leaf.dim()} dimensions of {leaf.dtype}" for path, leaf in in_order}
    own = [leaf.shape[dim] if _has(leaf, dim) else -1 for _, leaf in in_order]
    largest = map(max, zip(*agree(collectives, f"pad_across_processes(dim={dim})", facts, own), strict=True))
    by_path = dict(zip(facts, largest, strict=True))
    sizes = (by_path[path] for path, _ in leaves)
    return recursively_apply(lambda leaf: _lengthen(leaf, next(sizes), dim, pad_index, pad_first), tensor)


def pad_input_tensors(tensor: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Repeat the last row of every tensor until the batch size is a multiple of the number of processes.

    Args:
        tensor: Tensors nested in containers.
        batch_size: Number of rows of the batch.
        num_processes: Number of processes that get equal shards of the batch.
        dim: The dimension of the batch. Tensors without it stay unchanged.

    Returns:
        The same structure; the tensors are longer by `-batch_size % num_processes` rows.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: There is no row to repeat.

    Example:
        >>> pad_input_tensors(torch.arange(3), batch_size=3, num_processes=4)
        tensor([0, 1, 2, 2])
    """
    missing = -batch_size % num_processes

    def repeat_last(leaf: torch.Tensor) -> torch.Tensor:
        if missing == 0 or not -leaf.ndim <= dim < leaf.ndim:
            return leaf
        if leaf.shape[dim] == 0:
            raise ValueError(
                f"There is no row to repeat in a tensor of shape {tuple(leaf.shape)} along dim={dim!r}, "
                f"but the batch of {batch_size!r} needs {missing} more for {num_processes!r} processes."
            )
        last = leaf.narrow(dim, leaf.shape[dim] - 1, 1)
        return torch.cat([leaf, *[last] * missing], dim=dim)

    return recursively_apply(repeat_last, tensor, error_on_other_type=True)


def _has(leaf: torch.Tensor, dim: int) -> bool:
    return not leaf.is_nested and -leaf.ndim <= dim < leaf.ndim


def _lengthen(leaf: torch.Tensor, size: int, dim: int, value: float, first: bool) -> torch.Tensor:
    if size < 0 or size == leaf.shape[dim]:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = size
    longer = leaf.new_full(shape, value)
    start = size - leaf.shape[dim] if first else 0
    longer.narrow(dim, start, leaf.shape[dim]).copy_(leaf)
    return longer
