"""Gather, broadcast and reduce nested data across ranks, also on devices that record a program (XLA).

The buffers of `packing` are filled through byte views, each of which XLA would record: on such devices leaves
are joined and split by a few operations instead. The calls of the ranks are compared over the host, so that
they do not wait for the device. All ranks record the same operations, since each executes its own program,
and the collectives in these programs have to match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from accel_ops import packing, uneven_gather
from accel_ops.packing import (
    Bucket,
    Flat,
    PackingPlan,
    below_autograd,
    cache,
    cached_buffer,
    cut_all,
    flatten,
    make_buffer,
    sections,
    size_of,
)
from accel_ops.tree import recursively_apply
from accel_ops.uneven_gather import HEADER_BYTES, call_mismatch, check_same_call, compare_in_debug_mode
from accel_state.collectives import Collectives, ReduceOp, SingleCollectives
from accel_state.device_kinds import WITHOUT_STORAGE, runtime_module
from accel_state.errors import DistributedOperationException
from accel_state.frozen import frozen
from accel_state.runtime import current_or_single
from accel_state.torch_private import foreach_copy_

COMBINED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""Dtypes that `combine_rows` supports."""

# Dtypes with enough exponent range that scaling by a power of two before adding is exact.
_WIDE_EXPONENTS = {torch.float32, torch.float64, torch.bfloat16}


@frozen
class Scaling:
    """The reduction of values, and the scaling of the result.

    Attributes:
        divisor: The divisor of a mean, which may be 1; None for other reductions.
    """

    op: ReduceOp = "sum"
    divisor: int | None = None
    scale: float = 1.0

    @property
    def changes(self) -> bool:
        """Whether the result is scaled."""
        return self.divisor is not None or self.scale != 1.0


@frozen
class PendingReduce:
    """One reduction over all ranks.

    Attributes:
        total: The operand of this rank; overwritten by the result over all ranks.
        final: The result: `total` itself, or another tensor of its size.
        scaling: Reduction and scaling.
    """

    total: Tensor
    final: Tensor
    scaling: Scaling

    def finish(self) -> None:
        """Scale the result and store it in `final`."""
        total, divisor, scale = self.total, self.scaling.divisor, self.scaling.scale
        if total.dtype == torch.int64 and self.final is not total:
            torch.div(total, divisor or 1, out=self.final)
            total = self.final
        elif divisor is not None:
            total.div_(divisor)
        if scale != 1.0:
            total.mul_(scale)
        if self.final is not total:
            self.final.copy_(total)


def reduce_in_place(operand: Tensor, scaling: Scaling) -> PendingReduce:
    """Prepare the reduction of a tensor that may be overwritten.

    A mean or a scaled result of integers or booleans is computed in 64 bits and then cast to the default
    floating-point dtype; uint64, whose values int64 cannot all represent, is computed in float64, and float8,
    which has no arithmetic, in float32.
    """
    if operand.dtype.is_complex and scaling.op != "sum":
        raise TypeError(
            f"reduce(reduction={scaling.op!r}) of a {operand.dtype} tensor: complex numbers are only added. "
            'Use "sum" or "mean", or reduce torch.view_as_real(tensor).'
        )
    total = final = operand
    if scaling.changes:
        if not (operand.dtype.is_floating_point or operand.dtype.is_complex):
            total = operand.to(torch.float64 if operand.dtype == torch.uint64 else torch.int64, copy=True)
            final = torch.empty(operand.shape, dtype=torch.get_default_dtype(), device=operand.device)
        elif operand.dtype.itemsize == 1:
            total = operand.to(torch.float32)
    return PendingReduce(total=total, final=final, scaling=scaling)


def combine_rows(rows: Tensor, scaling: Scaling) -> PendingReduce:
    """Reduce the gathered operands of all ranks."""
    wide = scaling.changes and not rows.dtype.is_floating_point and not rows.dtype.is_complex
    if wide:
        rows = rows.to(torch.int64)
    if scaling.op == "sum":
        total = rows.sum(0, dtype=rows.dtype)
    else:
        total = {"max": rows.amax, "min": rows.amin, "prod": rows.prod}[scaling.op](0).to(rows.dtype)
    final = torch.empty(total.shape, dtype=torch.get_default_dtype()) if wide else total
    return PendingReduce(total=total, final=final, scaling=scaling)


def reduce_copy(operand: Tensor, scaling: Scaling, device: torch.device) -> PendingReduce:
    """Prepare the reduction of a tensor that must not change; read it once, and write the result once."""
    source = operand.detach().to(device)
    total = torch.empty(source.shape, dtype=source.dtype, device=device)
    factor = scaling.scale / (scaling.divisor or 1)
    linear = scaling.op != "prod" and source.dtype in _WIDE_EXPONENTS
    if linear and math.frexp(factor)[0] == 0.5:
        torch.mul(source, factor, out=total)  # a power of two: exact, so it can be fused with the copy
        return PendingReduce(total=total, final=total, scaling=Scaling(op=scaling.op))
    return reduce_in_place(total.copy_(source), scaling)


HOST = torch.device("cpu")


def is_recorded(device: torch.device) -> bool:
    """Return whether a device records operations, so that it uses the recorded collectives."""
    return device.type in WITHOUT_STORAGE


def recorded_gather(collectives: Collectives, flat: Flat, device: torch.device, *, same_shapes: bool) -> Any:
    """Gather leaves, padded to the largest size of dimension 0 for the message; see `gather`."""
    if runtime_module(device).is_global():
        return flat.data
    world_size = collectives.world_size
    leaves = [leaf.detach().to(device) for leaf in flat.leaves]
    leaves = [leaf if leaf.dim() else leaf[None] for leaf in leaves]
    rows = [[len(leaf)] * world_size for leaf in leaves] if same_shapes else _rows(collectives, flat)
    largest = [max(counts) for counts in rows]
    padded = [
        leaf if len(leaf) == most else pad(leaf, [0, 0] * (leaf.dim() - 1) + [0, most - len(leaf)])
        for leaf, most in zip(leaves, largest, strict=True)
    ]
    if any(len({*counts}) > 1 for counts in rows):
        # Ranks pad differently, so the padding must not be in the program of the collective.
        runtime_module(device).flush()
    gathered = leaves.copy()
    for members in _by_dtype(flat):
        joined = torch.cat([padded[index].reshape(-1) for index in members])
        everything = joined.new_empty(world_size * joined.numel())
        collectives.all_gather_into(everything, joined)
        parts = everything.view(world_size, joined.numel()).split(_sizes(padded, members), dim=1)
        for index, part in zip(members, parts, strict=True):
            blocks = part.reshape(world_size, *padded[index].shape)
            gathered[index] = torch.cat(
                [block[:count] for block, count in zip(blocks.unbind(), rows[index], strict=True)]
            )
    return flat.rebuild(gathered)


def recorded_broadcast(collectives: Collectives, flat: Flat, source: int, device: torch.device) -> None:
    """Overwrite leaves with those of one rank; see `broadcast`."""
    if runtime_module(device).is_global():
        return
    check_same_call(collectives, HOST, f"broadcast(from_process={source})", flat.plan)
    leaves = [leaf.detach() for leaf in flat.leaves]
    for members in _by_dtype(flat):
        joined = torch.cat([leaves[index].to(device).reshape(-1) for index in members])
        collectives.broadcast(joined, source)
        for index, part in zip(members, joined.split(_sizes(leaves, members)), strict=True):
            leaves[index].copy_(part.reshape(leaves[index].shape))


def recorded_reduce(
    collectives: Collectives, flat: Flat, scaling: Scaling, device: torch.device, call: str
) -> Any:
    """Reduce leaves over the ranks, all of which make the same `call`; see `reduce`."""
    if runtime_module(device).is_global():
        collectives, scaling = SingleCollectives(), replace(scaling, divisor=scaling.divisor and 1)
    check_same_call(collectives, HOST, call, flat.plan)
    leaves = [leaf.detach().to(device) for leaf in flat.leaves]
    results = leaves.copy()
    for members in _by_dtype(flat):
        pending = reduce_in_place(torch.cat([leaves[index].reshape(-1) for index in members]), scaling)
        collectives.all_reduce(pending.total, op=scaling.op)
        pending.finish()
        for index, part in zip(members, pending.final.split(_sizes(leaves, members)), strict=True):
            results[index] = part.reshape(leaves[index].shape).clone()
    return flat.rebuild(results)


def _rows(collectives: Collectives, flat: Flat) -> list[list[int]]:
    """Return the size of dimension 0 of every leaf on every rank, exchanged over the host."""
    described = flat.plan.leaves
    order = sorted(range(len(described)), key=lambda index: described[index].path)
    name = str(packing.signature(described))  # different structures have different names
    own = torch.tensor([[described[index].rows for index in order]], dtype=torch.int64)
    try:
        table = uneven_gather.gather(collectives, flatten({name: own}, "gather"), HOST)[name]
    except DistributedOperationException:
        raise call_mismatch("gather", collectives, uneven_gather.comparable_leaves(flat.plan)) from None
    columns: list[list[int]] = table.T.tolist()
    return [columns[order.index(index)] for index in range(len(order))]


def _by_dtype(flat: Flat) -> list[list[int]]:
    """Return the indices of the leaves of every dtype, in an order independent of the order of dicts."""
    described = flat.plan.leaves
    groups: dict[str, list[int]] = {}
    for index in sorted(range(len(described)), key=lambda index: described[index].path):
        groups.setdefault(str(described[index].dtype), []).append(index)
    return [groups[dtype] for dtype in sorted(groups)]


def _sizes(leaves: Sequence[Tensor], members: Sequence[int]) -> list[int]:
    return [leaves[index].numel() for index in members]


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

MAX_COMBINED = 1 << 19  # bytes of all ranks up to which each rank reduces them, rather than an all-reduce


def gather(tensor: T, *, same_shapes: bool = False) -> T:
    """Concatenate every tensor of nested data over all processes, along dimension 0, in rank order.

    It sends a header, then all leaves in one buffer; both in one message if they are small and gloo sends
    them. Sizes of dimension 0 may differ between the processes and may be 0; dtypes and the other dimensions
    must agree. Every dtype is supported.

    Args:
        tensor: Tensors nested in lists, tuples, named tuples, mappings and dataclasses.
        same_shapes: All shapes are known to be equal on all processes and are not exchanged, which avoids a
            synchronisation with the accelerator. If they are not equal, the result is undefined.

    Returns:
        The same structure on every process: a tensor of shape `(n, ...)` becomes `(sum of all n, ...)`, a 0-d
        tensor `(number of processes,)`, on the device of the process and without a graph. In a single process
        `tensor` itself.

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
    if is_recorded(runtime.device):
        return recorded_gather(collectives, flat, runtime.device, same_shapes=same_shapes)
    collect = uneven_gather.gather_even if same_shapes else uneven_gather.gather
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
        raise TypeError(f"gather_object concatenates lists, not a {type(object)}. Pass [object] instead.")
    return [item for part in runtime.collectives.all_gather_object(object) for item in part]


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Overwrite every tensor of nested data, in place, with the tensor of one process.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        from_process: The rank to broadcast from.

    Returns:
        `tensor`, or an equal structure of the same tensors.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: The process `from_process` does not exist.
        DistributedOperationException: Structures, types, shapes or `from_process` differ. Every process
            raises it, with the differences.

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
    if is_recorded(runtime.device):
        recorded_broadcast(collectives, flat, from_process, runtime.device)
        return tensor
    _broadcast_packed(collectives, flat, from_process, runtime.device)
    for index in flat.plan.large:
        _broadcast_alone(collectives, flat.leaves[index], from_process, runtime.device)
    return tensor


def broadcast_from(data: T, src: int = 0) -> T:
    """Call `broadcast`; the argument is named as in a private function that programs use."""
    return broadcast(data, src)


def broadcast_object_list(object_list: T, from_process: int = 0) -> T:
    """Replace the picklable objects in a list, in place, by the objects of one process.

    Args:
        object_list: A list of the same length on every process.
        from_process: The rank to broadcast from.

    Raises:
        TypeError: It is not a list.
        ValueError: The process `from_process` does not exist.
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
        raise TypeError(f"broadcast_object_list fills a list in place, but got a {type(object_list)}.")
    call = f"broadcast_object_list(from_process={from_process})"
    check_same_call(collectives, runtime.device, call, len(object_list))
    collectives.broadcast_object_list(object_list, from_process)
    return object_list


def reduce(tensor: T, reduction: Reduction = "mean", scale: float = 1.0) -> T:
    """Reduce every tensor of nested data over all processes; one message per dtype.

    Args:
        tensor: Tensors nested in containers, of the same structure, types and shapes on every process.
        reduction: `"sum"`, `"mean"`, `"max"`, `"min"`, `"prod"`, or `"none"`, which is another name of
            `"sum"`.
        scale: A factor for the result.

    Returns:
        The same structure with new tensors, on every process, without a graph. The dtype stays, except that
        the mean of integers or booleans, and any scaled result of them, has the default floating-point
        dtype.

    Raises:
        TypeError: A leaf is not a tensor, or is complex and `reduction` is neither a sum nor a mean.
        ValueError: `reduction` is unknown.
        DistributedOperationException: Structures, types, shapes, `reduction` or `scale` differ. Every process
            raises it, with the differences.

    Example:
        >>> reduce([torch.tensor([1.0, 2.0])], "sum", scale=0.5)
        [tensor([0.5000, 1.0000])]
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(
            f"reduction={reduction!r} is unknown. Choose one of {', '.join(map(repr, _REDUCTIONS))}."
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
    """Broadcast all leaves that are not large, of any dtype, in one message."""
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
            foreach_copy_(leaves, members)


def _members_in(owner: PackingPlan, rows: Tensor, source: int) -> list[Tensor]:
    """Return views of the packed leaves in the chunk of a rank, cached if `rows` is used again."""
    cached: tuple[Tensor, list[Tensor]] | None = owner.extras.get(("rows", source))
    if cached is None or cached[0] is not rows:
        members = cut_all(owner.packed, sections(owner.packed, rows[source], HEADER_BYTES))
        cached = rows, members
        cache(owner, ("rows", source), cached, 0)
    return cached[1]


def _broadcast_alone(collectives: Collectives, leaf: Tensor, source: int, device: torch.device) -> None:
    """Broadcast a large leaf, without a copy if it is contiguous on the device."""
    leaf = leaf.detach()
    moved = leaf.to(device).contiguous().resolve_conj()
    collectives.broadcast(moved, source)
    if moved is not leaf and collectives.rank != source:
        leaf.copy_(moved)


def _reduce(collectives: Collectives, flat: Flat, scaling: Scaling, device: torch.device) -> Any:
    """Reduce leaves over the ranks: in one message if they are small, else one per dtype or large leaf."""
    name = "mean" if scaling.divisor is not None else scaling.op
    call = f"reduce({name!r}, scale={float(scaling.scale)!r})"
    if is_recorded(device):
        return recorded_reduce(collectives, flat, scaling, device, call)
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
            for pending in packed:
                pending.finish()
        return flat.rebuild(flat.plan.restore_packed(_leaves_of(groups, packed)))
    with below_autograd():
        packed = [
            reduce_in_place(buffer.content[part].view(dtype), scaling)
            for part, dtype in zip(parts, types, strict=True)
        ]
    alone = [reduce_copy(flat.leaves[index], scaling, device) for index in large]
    for pending in (*packed, *alone):
        collectives.all_reduce(pending.total, op=scaling.op)
        with below_autograd():
            pending.finish()
    leaves = [*_leaves_of(groups, packed), *(pending.final for pending in alone)]
    return flat.rebuild(flat.plan.restore_packed(leaves))


def _leaves_of(groups: list[list[Bucket]], packed: list[PendingReduce]) -> list[Tensor]:
    """Return the results of packed leaves, bucket after bucket."""
    buckets: list[Bucket] = []
    blocks: list[Tensor] = []
    with below_autograd():
        for group, pending in zip(groups, packed, strict=True):
            first, start = pending.final.storage_offset(), group[0].start
            for bucket in group:
                offset = first + (bucket.start - start) // bucket.dtype.itemsize
                blocks.append(pending.final.as_strided(bucket.shape, bucket.strides, offset))
            buckets += group
        return cut_all(buckets, blocks)


def _reduce_alone(leaf: Tensor, scaling: Scaling) -> Tensor:
    with torch.no_grad():
        pending = reduce_copy(leaf, scaling, leaf.device)
        pending.finish()
    return pending.final


def _check_source(from_process: int, collectives: Collectives) -> None:
    if not 0 <= from_process < collectives.world_size:
        raise ValueError(
            f"from_process={from_process!r} does not exist: the ranks are 0 to {collectives.world_size - 1}."
        )
