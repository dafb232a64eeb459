"""Collectives on nested data: all leaves in one flat buffer, in one message."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_ops import checked, exchange
from accel_ops.packing import (
    Buffer,
    Flat,
    below_autograd,
    copy_all,
    cut_all,
    flatten,
    kept_buffer,
    make_buffer,
    size_of,
)
from accel_ops.reduction import PendingReduce, Scaling, reduce_copy, reduce_in_place
from accel_ops.same_call import check_same_call
from accel_ops.tree import recursively_apply
from accel_state.runtime import current_or_single

if TYPE_CHECKING:
    from torch import Tensor

    from accel_state.backends.base import Collectives, ReduceOp

Reduction = Literal["sum", "mean", "none", "max", "min", "prod"]

_REDUCTIONS: dict[str, ReduceOp] = {
    "sum": "sum",
    "mean": "sum",
    "none": "sum",
    "max": "max",
    "min": "min",
    "prod": "prod",
}


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
    return collect(collectives, flat, runtime.device)


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
        DistributedOperationException: Structures, types, shapes or `from_process` differ. Every process
            raises it, with what differs.

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
        DistributedOperationException: Lengths or `from_process` differ. Every process raises it.

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
    call = f"broadcast_object_list(from_process={from_process})"
    check_same_call(collectives, runtime.device, call, len(object_list))
    collectives.broadcast_object_list(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: Reduction = "mean", scale: float = 1.0) -> Any:
    """Combine every tensor of nested data over all processes; one message per element type.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        reduction: `"sum"`, `"mean"`, `"max"`, `"min"`, `"prod"`, or `"none"`, which is another name for the
            sum.
        scale: A factor for the result.

    Returns:
        The same structure with new tensors, on every process, without a graph. The element type stays, but
        the mean of integers or booleans, and any result of theirs times a scale, is of the default floating
        type.

    Raises:
        TypeError: A leaf is not a tensor, or is complex and neither added nor averaged.
        ValueError: `reduction` is something else.
        DistributedOperationException: Structures, types, shapes, `reduction` or `scale` differ. Every process
            raises it, with what differs.

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
    divisor = collectives.world_size if reduction == "mean" else None
    scaling = Scaling(op=_REDUCTIONS[reduction], divisor=divisor, scale=scale)
    if collectives.world_size == 1:
        return recursively_apply(_reduce_alone, tensor, scaling, error_on_other_type=True)
    return _reduce(collectives, flatten(tensor, "reduce"), scaling, runtime.device)


def _broadcast_packed(collectives: Collectives, flat: Flat, source: int, device: torch.device) -> None:
    """Broadcast the leaves that are not large, all types in one message."""
    buckets = flat.plan.packed
    call = f"broadcast(from_process={source})"
    if not buckets:
        check_same_call(collectives, device, call, flat.plan)
        return
    buffer, new = kept_buffer(flat.plan, "broadcast", buckets, device, capacity=size_of(buckets))
    if new:
        buffer.members.extend(cut_all(buckets, buffer.sections))

    def fill() -> None:
        if collectives.rank == source:
            buffer.fill(flat.leaves)

    check_same_call(collectives, device, call, flat.plan, fill)
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


def _reduce(collectives: Collectives, flat: Flat, scaling: Scaling, device: torch.device) -> Any:
    """Combine leaves over the ranks, one message per element type and one per large leaf."""
    buffer = make_buffer(flat.plan.packed, device)
    name = "mean" if scaling.divisor is not None else scaling.op
    call = f"reduce({name!r}, scale={float(scaling.scale)!r})"
    check_same_call(collectives, device, call, flat.plan, lambda: buffer.fill(flat.leaves))
    pending, blocks = _start_packed(buffer, scaling)
    large = [reduce_copy(flat.leaves[index], scaling, device) for index in flat.plan.large]
    result: list[Any] = []

    def cut_out() -> None:
        with below_autograd():
            leaves = cut_all(buffer.buckets, blocks)
        result.append(flat.rebuild(flat.plan.restore_packed([*leaves, *(one.final for one in large)])))

    for one in (*pending, *large):
        collectives.all_reduce(one.total, cut_out if not result else None, op=scaling.op)
        with below_autograd():
            one.finish()
    if not result:
        cut_out()
    return result[0]


def _start_packed(buffer: Buffer, scaling: Scaling) -> tuple[list[PendingReduce], list[Tensor]]:
    """Prepare one reduction for every element type in a buffer; return them and the buckets' results."""
    pending: list[PendingReduce] = []
    blocks: list[Tensor] = []
    with below_autograd():
        for dtype, group in groupby(
            zip(buffer.buckets, buffer.sections, strict=True), lambda pair: pair[0].dtype
        ):
            buckets, mine = zip(*group, strict=True)
            start = buckets[0].start
            operand = buffer.content[start : buckets[-1].stop].view(dtype)
            pending.append(reduce_in_place(operand, scaling))
            final = pending[-1].final
            if final is not operand:
                firsts = [(bucket.start - start) // dtype.itemsize for bucket in buckets]
                mine = [
                    final.as_strided(b.shape, b.strides, first)
                    for b, first in zip(buckets, firsts, strict=True)
                ]
            blocks += mine
    return pending, blocks


def _reduce_alone(leaf: Tensor, scaling: Scaling) -> Tensor:
    """Reduce over one process."""
    with torch.no_grad():
        pending = reduce_copy(leaf, scaling, leaf.device)
        pending.finish()
    return pending.final


def _check_source(from_process: int, collectives: Collectives) -> None:
    if not 0 <= from_process < collectives.world_size:
        raise ValueError(
            f"from_process={from_process!r} does not exist: the ranks are 0 to {collectives.world_size - 1}."
        )
