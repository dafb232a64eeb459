"""Collectives on nested data: all leaves in one flat buffer, in one message."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from accel_ops import exchange, recorded
from accel_ops.packing import (
    Flat,
    below_autograd,
    cache,
    cached_buffer,
    copy_all,
    cut_all,
    flatten,
    make_buffer,
    sections,
    size_of,
)
from accel_ops.reduction import COMBINED, PendingReduce, Scaling, combine_rows, reduce_copy, reduce_in_place
from accel_ops.same_call import HEADER_BYTES, check_same_call, compare_in_debug_mode
from accel_ops.tree import recursively_apply
from accel_state.runtime import current_or_single

if TYPE_CHECKING:
    from torch import Tensor

    from accel_ops.packing import Plan
    from accel_ops.plan import Bucket
    from accel_state.backends.base import Collectives, ReduceOp

T = TypeVar("T")

Reduction = Literal["sum", "mean", "none", "max", "min", "prod"]

_REDUCTIONS: dict[str, ReduceOp] = {
    "sum": "sum",
    "mean": "sum",
    "none": "sum",
    "max": "max",
    "min": "min",
    "prod": "prod",
}

MAX_COMBINED = 1 << 19  # bytes of all ranks that are combined by each, rather than by an all-reduce


def gather(tensor: T, *, same_shapes: bool = False) -> T:
    """Concatenate every tensor of nested data over all processes, along dimension 0, in rank order.

    All leaves are sent in one message. Their sizes of dimension 0 may differ between the processes and may be
    0; element types and the other dimensions must agree. Every dtype is supported.

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
        compare_in_debug_mode(
            collectives, "gather", tensor, detail=f"same_shapes={same_shapes}", rows_differ=not same_shapes
        )
    flat = flatten(tensor, "gather")
    if recorded.is_recorded(runtime.device):
        return recorded.gather(collectives, flat, runtime.device, same_shapes=same_shapes)
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
        compare_in_debug_mode(runtime.collectives, "gather_object")
    if not isinstance(object, (list, tuple)):
        raise TypeError(f"gather_object concatenates lists, not a {type(object)}; pass [object] instead.")
    return [item for part in runtime.collectives.all_gather_object(object) for item in part]


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Overwrite every tensor of nested data, in place, with that of one process.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        from_process: The rank to broadcast from.

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
        compare_in_debug_mode(collectives, "broadcast", tensor, detail=f"from_process={from_process}")
    flat = flatten(tensor, "broadcast")
    if recorded.is_recorded(runtime.device):
        recorded.broadcast(collectives, flat, from_process, runtime.device)
        return tensor
    _broadcast_packed(collectives, flat, from_process, runtime.device)
    for index in flat.plan.large:
        _broadcast_alone(collectives, flat.leaves[index], from_process, runtime.device)
    return tensor


def broadcast_object_list(object_list: T, from_process: int = 0) -> T:
    """Replace the picklable objects in a list, in place, by those of one process.

    Args:
        object_list: A list, equally long on every process.
        from_process: The rank to broadcast from.

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
        compare_in_debug_mode(collectives, "broadcast_object_list", detail=f"from_process={from_process}")
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list in place, and got a {type(object_list)}.")
    call = f"broadcast_object_list(from_process={from_process})"
    check_same_call(collectives, runtime.device, call, len(object_list))
    collectives.broadcast_object_list(object_list, from_process)
    return object_list


def reduce(tensor: T, reduction: Reduction = "mean", scale: float = 1.0) -> T:
    """Reduce every tensor of nested data over all processes; one message per dtype.

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
        compare_in_debug_mode(collectives, "reduce", tensor, detail=f"{reduction!r}, scale={scale!r}")
    divisor = collectives.world_size if reduction == "mean" else None
    scaling = Scaling(op=_REDUCTIONS[reduction], divisor=divisor, scale=scale)
    if collectives.world_size == 1:
        return recursively_apply(_reduce_alone, tensor, scaling, error_on_other_type=True)
    return _reduce(collectives, flatten(tensor, "reduce"), scaling, runtime.device)


def _broadcast_packed(collectives: Collectives, flat: Flat, source: int, device: torch.device) -> None:
    """Broadcast the leaves that are not large, all dtypes in one message."""
    buckets = flat.plan.packed
    sends = collectives.rank == source
    size = HEADER_BYTES + size_of(buckets)
    buffer, new = cached_buffer(flat.plan, "broadcast", buckets, device, capacity=size, start=HEADER_BYTES)
    if new:
        buffer.members.extend(cut_all(buckets, buffer.sections))
    if sends:
        buffer.fill(flat.leaves)
    at_once = device.type == "cpu" and size <= collectives.chunk_bytes
    chunk = buffer.content if at_once and sends else None
    rows = check_same_call(collectives, device, f"broadcast(from_process={source})", flat.plan, chunk)
    if not buckets:
        return
    members = buffer.members
    if rows is None or not at_once:
        collectives.broadcast(buffer.content, source)
    elif not sends:
        members = _members_in(flat.plan, rows, source)
    if not sends:
        leaves = [flat.leaves[index] for bucket in buckets for index in bucket.members]
        with below_autograd():
            copy_all(leaves, members)


def _members_in(owner: Plan, rows: Tensor, source: int) -> list[Tensor]:
    """Return the packed leaves in the chunk of a rank; they are cut once if `rows` is used again."""
    cached: tuple[Tensor, list[Tensor]] | None = owner.extras.get(("rows", source))
    if cached is None or cached[0] is not rows:
        members = cut_all(owner.packed, sections(owner.packed, rows[source], HEADER_BYTES))
        cached = rows, members
        cache(owner, ("rows", source), cached, 0)
    return cached[1]


def _broadcast_alone(collectives: Collectives, leaf: Tensor, source: int, device: torch.device) -> None:
    """Broadcast a large leaf, without a copy if it is contiguous on the device."""
    leaf = leaf.detach()
    moved = leaf.to(device).contiguous()
    collectives.broadcast(moved, source)
    if moved is not leaf and collectives.rank != source:
        leaf.copy_(moved)


def _reduce(collectives: Collectives, flat: Flat, scaling: Scaling, device: torch.device) -> Any:
    """Reduce leaves over the ranks: in one message if they are small, else one per dtype and large leaf."""
    name = "mean" if scaling.divisor is not None else scaling.op
    call = f"reduce({name!r}, scale={float(scaling.scale)!r})"
    if recorded.is_recorded(device):
        return recorded.reduce(collectives, flat, scaling, device, call)
    buckets, large = flat.plan.packed, flat.plan.large
    size = HEADER_BYTES + size_of(buckets)
    at_once = (
        device.type == "cpu"
        and not large
        and size <= min(collectives.chunk_bytes, MAX_COMBINED // collectives.world_size)
        and all(bucket.dtype in COMBINED for bucket in buckets)
    )
    if at_once:
        buffer, _ = cached_buffer(flat.plan, "reduce", buckets, device, capacity=size, start=HEADER_BYTES)
    else:
        buffer = make_buffer(buckets, device, start=HEADER_BYTES)
    buffer.fill(flat.leaves)
    rows = check_same_call(collectives, device, call, flat.plan, buffer.content if at_once else None)
    groups = [list(group) for _, group in groupby(buckets, attrgetter("dtype"))]
    parts = [slice(HEADER_BYTES + group[0].start, HEADER_BYTES + group[-1].stop) for group in groups]
    types = [group[0].dtype for group in groups]
    if rows is not None and at_once:
        with below_autograd():
            packed = [
                combine_rows(rows[:, part].view(dtype), scaling)
                for part, dtype in zip(parts, types, strict=True)
            ]
            for one in packed:
                one.finish()
        return flat.rebuild(flat.plan.restore_packed(_leaves_of(groups, packed)))
    with below_autograd():
        packed = [
            reduce_in_place(buffer.content[part].view(dtype), scaling)
            for part, dtype in zip(parts, types, strict=True)
        ]
    alone = [reduce_copy(flat.leaves[index], scaling, device) for index in large]
    for one in (*packed, *alone):
        collectives.all_reduce(one.total, op=scaling.op)
        with below_autograd():
            one.finish()
    leaves = [*_leaves_of(groups, packed), *(one.final for one in alone)]
    return flat.rebuild(flat.plan.restore_packed(leaves))


def _leaves_of(groups: list[list[Bucket]], packed: list[PendingReduce]) -> list[Tensor]:
    """Return the results of packed leaves, bucket after bucket."""
    buckets: list[Bucket] = []
    blocks: list[Tensor] = []
    with below_autograd():
        for group, one in zip(groups, packed, strict=True):
            first, start = one.final.storage_offset(), group[0].start
            for bucket in group:
                offset = first + (bucket.start - start) // bucket.dtype.itemsize
                blocks.append(one.final.as_strided(bucket.shape, bucket.strides, offset))
            buckets += group
        return cut_all(buckets, blocks)


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
