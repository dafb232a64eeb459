"""Collectives on nested data: all leaves in one flat buffer, in one message."""

from __future__ import annotations

import math
from itertools import groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_ops import checked, exchange
from accel_ops.packing import (
    Flat,
    below_autograd,
    copy_all,
    cut_all,
    flatten,
    kept_buffer,
    make_buffer,
    size_of,
)
from accel_ops.tree import recursively_apply
from accel_state.runtime import current_or_single

if TYPE_CHECKING:
    from torch import Tensor

    from accel_state.backends.base import Collectives

Reduction = Literal["sum", "mean", "none"]

_REDUCTIONS = ("sum", "mean", "none")
_WIDE_EXPONENTS = {torch.float32, torch.float64, torch.bfloat16}


def gather(tensor: Any, *, same_shapes: bool = False) -> Any:
    """Concatenate every tensor of nested data over all processes, along dimension 0, in rank order.

    All leaves travel together. Their sizes of dimension 0 may differ between the processes and may be 0;
    element types and the other dimensions must agree. Any element type travels.

    Args:
        tensor: Tensors nested in lists, tuples, named tuples, mappings and dataclasses.
        same_shapes: All shapes are known to be equal on all processes, so they are not exchanged. On an
            accelerator this spares waiting for the device. If they are not equal, the result is undefined.

    Returns:
        The same structure on every process: a tensor of shape `(n, ...)` becomes `(sum of all n, ...)`, one
        without dimensions `(number of processes,)`, on the device of the process and without a graph. In a
        single process `tensor` itself.

    Raises:
        TypeError: A leaf is not a tensor.
        DistributedOperationException: Structures, types or trailing shapes differ. Every process raises
            it, with the path of the leaf and the shapes of all processes.

    Example:
        >>> gather({"loss": torch.ones(1)})
        {'loss': tensor([1.])}
    """
    runtime = current_or_single()
    collectives = runtime.collectives
    if collectives.world_size == 1:
        return tensor
    if runtime.debug:
        checked.check(
            collectives, "gather", tensor, detail=f"same_shapes={same_shapes}", rows_differ=not same_shapes
        )
    flat = flatten(tensor, "gather")
    collect = exchange.gather_even if same_shapes else exchange.gather
    return flat.rebuild(collect(collectives, flat.plan, flat.leaves, runtime.device))


def gather_object(object: Any) -> Any:  # noqa: A002 - the documented name
    """Concatenate the lists of picklable objects of all processes, in rank order.

    Args:
        object: A list or tuple, of any length.

    Returns:
        A list of the objects of all processes, on every process. In a single process `object` itself.

    Raises:
        TypeError: `object` is neither a list nor a tuple.

    Example:
        >>> gather_object(["cat", "dog"])
        ['cat', 'dog']
    """
    runtime = current_or_single()
    if runtime.collectives.world_size == 1:
        return object
    if runtime.debug:
        checked.check(runtime.collectives, "gather_object")
    if not isinstance(object, (list, tuple)):
        raise TypeError(f"gather_object concatenates lists, not a {type(object)}; pass [object] instead.")
    return [item for part in runtime.collectives.all_gather_object(object) for item in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite every tensor of nested data, in place, with that of one process.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        from_process: Whose values all get.

    Returns:
        `tensor`, or an equal structure around the same tensors.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: There is no process `from_process`.

    Example:
        >>> broadcast([torch.ones(1)])
        [tensor([1.])]
    """
    runtime = current_or_single()
    collectives = runtime.collectives
    if collectives.world_size == 1:
        return tensor
    _check_source(from_process, collectives)
    if runtime.debug:
        checked.check(collectives, "broadcast", tensor, detail=f"from_process={from_process}")
    flat = flatten(tensor, "broadcast")
    _broadcast_packed(collectives, flat, from_process, runtime.device)
    for index in flat.plan.large:
        _broadcast_alone(collectives, flat.leaves[index], from_process, runtime.device)
    return tensor


def broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    """Replace the picklable objects in a list, in place, by those of one process.

    Args:
        object_list: A list, equally long on every process.
        from_process: Whose objects all get.

    Returns:
        `object_list`.

    Raises:
        TypeError: It is not a list.
        ValueError: There is no process `from_process`.

    Example:
        >>> broadcast_object_list(["run-7"])
        ['run-7']
    """
    runtime = current_or_single()
    collectives = runtime.collectives
    if collectives.world_size == 1:
        return object_list
    _check_source(from_process, collectives)
    if runtime.debug:
        checked.check(collectives, "broadcast_object_list", detail=f"from_process={from_process}")
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list in place, and got a {type(object_list)}.")
    collectives.broadcast_object_list(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Add every tensor of nested data over all processes, or average it; one message per element type.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        reduction: `"sum"`, `"mean"`, or `"none"`, which is another name for the sum.
        scale: A factor for the result.

    Returns:
        The same structure with new tensors, on every process, without a graph. The element type stays, but
        the mean of integers or booleans, and their sum times a scale, is of the default floating type.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: `reduction` is something else.

    Example:
        >>> reduce([torch.tensor([1.0, 2.0])], "sum", scale=0.5)
        [tensor([0.5000, 1.0000])]
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduction={reduction!r} is unknown; choose one of {', '.join(map(repr, _REDUCTIONS))}."
        )
    runtime = current_or_single()
    collectives = runtime.collectives
    if runtime.debug and collectives.world_size > 1:
        checked.check(collectives, "reduce", tensor, detail=f"{reduction!r}, scale={scale!r}")
    members = collectives.world_size if reduction == "mean" else None
    if collectives.world_size == 1:
        return recursively_apply(
            lambda leaf: _summed(collectives, leaf.detach().clone(), members, scale),
            tensor,
            error_on_other_type=True,
        )
    flat = flatten(tensor, "reduce")
    results = _reduce_packed(collectives, flat, members, scale, runtime.device)
    results += [
        _reduce_alone(collectives, flat.leaves[index], members, scale, runtime.device)
        for index in flat.plan.large
    ]
    return flat.rebuild(flat.plan.restore_packed(results))


def _broadcast_packed(collectives: Collectives, flat: Flat, source: int, device: torch.device) -> None:
    """Broadcast the leaves that are not large, all types in one message."""
    buckets = flat.plan.packed
    if not buckets:
        return
    buffer, new = kept_buffer(flat.plan, "broadcast", buckets, device, capacity=size_of(buckets))
    if new:
        buffer.members.extend(cut_all(buckets, buffer.sections))
    if collectives.rank == source:
        buffer.fill(flat.leaves)
    collectives.broadcast(buffer.content, source)
    if collectives.rank != source:
        leaves = [flat.leaves[index] for bucket in buckets for index in bucket.members]
        with below_autograd():
            copy_all(leaves, buffer.members)


def _broadcast_alone(collectives: Collectives, leaf: Tensor, source: int, device: torch.device) -> None:
    """Broadcast a large leaf without a copy, if it lies in memory as it has to."""
    leaf = leaf.detach()
    carried = leaf.to(device).contiguous()
    collectives.broadcast(carried, source)
    if carried is not leaf and collectives.rank != source:
        leaf.copy_(carried)


def _reduce_packed(
    collectives: Collectives, flat: Flat, members: int | None, scale: float, device: torch.device
) -> list[Tensor]:
    """Reduce the leaves that are not large, one message per element type; the results come by buckets."""
    buffer = make_buffer(flat.plan.packed, device)
    buffer.fill(flat.leaves)
    leaves: list[Tensor] = []
    blocks = iter(buffer.sections)
    with below_autograd():
        for dtype, group in groupby(buffer.buckets, attrgetter("dtype")):
            same = list(group)
            start, stop = same[0].start, same[-1].stop
            addends = buffer.content[start:stop].view(dtype)
            total = _summed(collectives, addends, members, scale)
            mine = list(islice(blocks, len(same)))
            if total is not addends:
                firsts = [(bucket.start - start) // dtype.itemsize for bucket in same]
                mine = [
                    total.as_strided(bucket.shape, bucket.strides, first)
                    for bucket, first in zip(same, firsts, strict=True)
                ]
            leaves += cut_all(same, mine)
    return leaves


def _reduce_alone(
    collectives: Collectives, leaf: Tensor, members: int | None, scale: float, device: torch.device
) -> Tensor:
    """Reduce a large leaf, reading and writing its memory as rarely as possible."""
    leaf = leaf.detach().to(device)
    factor = scale / (members or 1)
    total = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    if leaf.dtype in _WIDE_EXPONENTS and math.frexp(factor)[0] == 0.5:
        # Scaling by a power of two is exact, so it can come first, together with the copy.
        collectives.all_reduce(torch.mul(leaf, factor, out=total))
        return total
    return _summed(collectives, total.copy_(leaf), members, scale)


def _summed(collectives: Collectives, total: Tensor, members: int | None, scale: float) -> Tensor:
    """The sum of a tensor over all ranks, divided by `members` and scaled; `total` is overwritten."""
    dtype = total.dtype
    changes = members is not None or scale != 1.0
    if changes and not (dtype.is_floating_point or dtype.is_complex):
        total = total.to(torch.int64)
    elif changes and dtype.itemsize == 1:
        total = total.to(torch.float32)  # there is no arithmetic on float8
    collectives.all_reduce(total)
    if members is not None:
        total = (
            total.div_(members)
            if total.dtype.is_floating_point or total.dtype.is_complex
            else total / members
        )
    if scale != 1.0:
        total = total * scale
    return total.to(dtype) if dtype.is_floating_point and dtype.itemsize == 1 else total


def _check_source(from_process: int, collectives: Collectives) -> None:
    if not 0 <= from_process < collectives.world_size:
        raise ValueError(
            f"from_process={from_process!r} does not exist: the ranks are 0 to {collectives.world_size - 1}."
        )
