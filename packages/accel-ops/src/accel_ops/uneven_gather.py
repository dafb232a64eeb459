"""Gather tensors whose number of rows differs between ranks: a fixed header, then one buffer of all leaves.

The header has four numbers: a hash of the structure, a hash of the sizes of dimension 0, the number of
leaves, and the bytes that the rank needs. From the headers of all ranks each rank knows whether they agree,
and the size of the buffer. If sizes differ they are in the buffer, in front of the leaves; if all are equal,
large leaves are sent without a copy.

A collective with different numbers of bytes on different ranks aborts a process or mixes values silently, so
ranks compare digests of their calls. If a backend allows every rank to send any number of bytes, header or
digest and the data that fit are one message: two messages take 1.6 times as long. Otherwise a message of a
few bytes comes first. For a broadcast or a reduction this message is an all-reduce with the maximum of the
digest and of its negative: both are unchanged if and only if all ranks have the same digest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops import packing
from accel_ops.packing import below_autograd, cache, cached_buffer, cut_all, describe, sections, size_of
from accel_ops.tree import walk
from accel_state.collectives import Collectives
from accel_state.errors import DistributedOperationException
from accel_state.frozen import frozen
from accel_state.hang_monitor import collective_scope
from accel_state.rank_status import Description, compare_calls
from accel_state.runtime import current_or_single

if TYPE_CHECKING:
    from accel_ops.packing import Bucket, Flat, PackingPlan, Restore


def gather(collectives: Collectives, flat: Flat, device: torch.device) -> Any:
    """Gather leaves whose sizes of dimension 0 may differ between ranks; see `collectives.gather`."""
    # 1. Exchange headers, with the leaves if they fit in the message. The scope includes reading the result,
    #    which waits for a GPU's collective.
    world_size = collectives.world_size
    header = _header(flat.plan, device)
    stride = collectives.chunk_bytes if device.type == "cpu" else 0
    with collective_scope("gather"):
        if stride:
            fits = header.nbytes <= stride
            chunk = _chunk(header, flat, header.nbytes, device) if fits else header.content[:PREFIX]
            received = collectives.exchange_chunks(chunk).view(-1)
        else:
            received = torch.empty(world_size * PREFIX, dtype=torch.uint8, device=device)
            collectives.all_gather_into(received, header.content[:PREFIX])
        prefixes: list[list[int]] = received.view(torch.int64).view(world_size, -1)[:, :4].tolist()
    # 2. Compare the headers.
    if any(prefix[0] != header.structure for prefix in prefixes):
        raise call_mismatch("gather", collectives, comparable_leaves(flat.plan))
    sizes = tuple(prefix[1] for prefix in prefixes)
    even = sizes.count(header.sizes) == world_size
    # 3. Exchange the leaves that did not fit.
    need = max(prefix[3] for prefix in prefixes)
    if need > stride:
        if even:
            return gather_even(collectives, flat, device)
        stride = _aligned(need)
        received = torch.empty(world_size * stride, dtype=torch.uint8, device=device)
        collectives.all_gather_into(received, _chunk(header, flat, stride, device))
    # 4. Extract the leaves by the layout for these sizes.
    layout = flat.plan.extras.get((sizes, stride, device))
    if layout is None:
        ranks = [flat.plan.buckets] * world_size
        if not even:
            heads = received.view(torch.int64).view(world_size, -1)
            rows = heads[:, 4 : 4 + len(flat.leaves)].tolist()
            ranks = [packing.at_rows(flat.plan.buckets, counts) for counts in rows]
        layout = _layout_of(ranks, flat.plan.restore, header.start, received)
        _keep(flat.plan, (sizes, stride, device), layout)
    return _extract(flat, layout, received)


def gather_even(collectives: Collectives, flat: Flat, device: torch.device) -> Any:
    """Gather leaves with the same shape on every rank: no exchange of shapes, no copy of large leaves."""
    world_size = collectives.world_size
    buckets, large = flat.plan.packed, flat.plan.large
    joined: list[Tensor] = []
    for index in large:
        leaf = flat.leaves[index].detach().to(device).contiguous()
        joined.append(leaf.new_empty((world_size * leaf.shape[0], *leaf.shape[1:])))
        collectives.all_gather_into(joined[-1], leaf)
    if not buckets:
        return flat.rebuild(flat.plan.restore_packed(joined))
    size = _aligned(size_of(buckets))
    buffer, _ = cached_buffer(flat.plan, "even", buckets, device, capacity=size)
    buffer.fill(flat.leaves)
    received = torch.empty(world_size * size, dtype=torch.uint8, device=device)
    collectives.all_gather_into(received, buffer.content)
    layout = flat.plan.extras.get((world_size, device))
    if layout is None:
        layout = _layout_of([buckets] * world_size, flat.plan.restore_packed, 0, received)
        _keep(flat.plan, (world_size, device), layout)
    return _extract(flat, layout, received, joined)


def _extract(flat: Flat, layout: GatherLayout, received: Tensor, large: Sequence[Tensor] = ()) -> Any:
    """Copy the leaves out of the chunks of all ranks; rebuild the structure around them."""
    with below_autograd():
        content = torch.empty(layout.nbytes, dtype=torch.uint8, device=received.device)
        if layout.order is not None:
            units = received.view(layout.carrier).view(-1, layout.unit)
            slots = content.view(layout.carrier).view(-1, layout.unit)
            torch.index_select(units, 0, layout.order, out=slots)
        elif layout.segments:
            torch.cat([received[first : first + length] for first, length in layout.segments], out=content)
        leaves = cut_all(layout.joined, sections(layout.joined, content))
    return flat.rebuild(layout.restore([*leaves, *large]))


@frozen
class GatherLayout:
    """The plan that extracts leaves, concatenated over the ranks, from the chunks of all ranks.

    Attributes:
        joined: The layout of the leaves after the slices are put in order.
        restore: Puts the leaves into the order of the structure.
        segments: Offset and length of every slice, in order.
        nbytes: The total length.
        order: The slices as indices of units; None if they are too few or too many for an index.
        unit: The unit, in elements of `carrier`.
        carrier: The dtype in which units are copied.
    """

    joined: tuple[Bucket, ...]
    restore: Restore
    segments: list[tuple[int, int]]
    nbytes: int
    order: Tensor | None
    unit: int
    carrier: torch.dtype


PREFIX = 32  # bytes: four 64-bit numbers
MAX_INDEX = 1 << 16  # indices that a layout keeps, 4 bytes each
FEW = 4  # up to this many slices, concatenating is faster than selecting by an index
_CARRIERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def _layout_of(
    ranks: Sequence[tuple[Bucket, ...]], restore: Restore, start: int, received: Tensor
) -> GatherLayout:
    stride = len(received) // len(ranks)
    segments = packing.interleave(ranks, start, stride)
    by_rank = [[count for bucket in buckets for count in bucket.rows] for buckets in ranks]
    totals = [sum(counts) for counts in zip(*by_rank, strict=True)]
    nbytes = sum(length for _, length in segments)
    order, unit = None, packing.unit_of([*segments, (0, stride)])
    carrier = next(dtype for dtype in _CARRIERS if unit % dtype.itemsize == 0)
    if len(segments) > FEW and nbytes and nbytes // unit <= MAX_INDEX:
        with torch.inference_mode(mode=False):
            order = torch.tensor(packing.index_of(segments, unit), dtype=torch.int32, device=received.device)
    return GatherLayout(
        joined=packing.at_rows(ranks[0], totals, scalars=False),
        restore=restore,
        segments=segments,
        nbytes=nbytes,
        order=order,
        unit=unit // carrier.itemsize,
        carrier=carrier,
    )


MAX_LAYOUTS = 32  # cached per plan


def _keep(flat_plan: PackingPlan, key: Hashable, layout: GatherLayout) -> None:
    """Cache a layout; drop all layouts at a limit, which sizes that change in each call reach."""
    if len(flat_plan.extras) >= MAX_LAYOUTS:
        flat_plan.clear_cache()
    cache(flat_plan, key, layout, 0 if layout.order is None else layout.order.nbytes)


@frozen
class ChunkHeader:
    """The header of the data that a rank sends.

    Attributes:
        structure: Hash of paths, dtypes and shapes without dimension 0.
        sizes: Hash of the sizes of dimension 0.
        start: Offset of the data in the chunk.
        nbytes: Bytes of prefix, sizes and data.
        content: Prefix and sizes, on the device that sends them.
    """

    structure: int
    sizes: int
    start: int
    nbytes: int
    content: Tensor


def _header(flat_plan: PackingPlan, device: torch.device) -> ChunkHeader:
    header = flat_plan.extras.get(device)
    if header is None:
        rows = [count for bucket in flat_plan.buckets for count in bucket.rows]
        structure = packing.signature(flat_plan.leaves)
        sizes = packing.digest(repr(rows))
        start = _aligned(PREFIX + 8 * len(rows), 64)
        nbytes = start + flat_plan.nbytes
        content = struct.pack(f"<{4 + len(rows)}q", structure, sizes, len(rows), nbytes, *rows)
        header = flat_plan.extras[device] = ChunkHeader(
            structure=structure,
            sizes=sizes,
            start=start,
            nbytes=nbytes,
            content=torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device),
        )
    return header


def _chunk(header: ChunkHeader, flat: Flat, capacity: int, device: torch.device) -> Tensor:
    """Return a buffer of `capacity` bytes with header and leaves."""
    buffer, new = cached_buffer(
        flat.plan, "chunk", flat.plan.buckets, device, capacity=capacity, start=header.start
    )
    if new:
        buffer.content[: len(header.content)].copy_(header.content)
    buffer.fill(flat.leaves)
    return buffer.content


def _aligned(nbytes: int, to: int = 16) -> int:
    """Round up to a multiple: by default of 16, the largest element size."""
    return -(-nbytes // to) * to


HEADER_BYTES = 32  # in front of the data of a chunk


def check_same_call(
    collectives: Collectives,
    device: torch.device,
    call: str,
    structure: PackingPlan | int,
    chunk: Tensor | None = None,
) -> Tensor | None:
    """Check that every rank is about to make the same call on matching data.

    Args:
        collectives: The collectives of the run.
        device: Its device.
        call: The operation and its arguments besides the data, such as `"reduce('sum', scale=1.0)"`.
        structure: The data: paths, dtypes and shapes of its leaves, or a number of objects.
        chunk: Bytes to send in the same message if possible: `HEADER_BYTES` (digest), then data; on the CPU.

    Raises:
        DistributedOperationException: The calls differ. Every rank raises it, with the differences.

    Returns:
        The chunks of all ranks as `Collectives.exchange_chunks` returns them, `None` if it cannot be used.
    """
    contents = structure if isinstance(structure, int) else structure_digest(structure)
    digest = packing.digest(f"{call}: {contents}")
    rows: Tensor | None = None
    if collectives.chunk_bytes:
        if chunk is None:
            chunk = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        chunk[:HEADER_BYTES].view(torch.int64).fill_(digest)
        rows = collectives.exchange_chunks(chunk)
        heads: list[int] = rows.view(torch.int64)[:, 0].tolist()
        same = heads.count(digest) == len(heads)
    else:
        lanes = torch.tensor([digest, -digest], device=device)
        with collective_scope("all_reduce"):  # includes the read, which waits for a GPU's collective
            collectives.all_reduce(lanes, op="max")
            same = lanes.tolist() == [digest, -digest]
    if not same:
        raise call_mismatch(call, collectives, _facts(structure))
    return rows


def _facts(structure: PackingPlan | int) -> dict[str, tuple[Hashable, str]]:
    """Return the properties that must agree, for `call_mismatch`."""
    if isinstance(structure, int):
        return {"": (structure, f"{structure} objects")}
    return {
        leaf.path: ((leaf.dtype, leaf.shape), describe(leaf.dtype, leaf.shape)) for leaf in structure.leaves
    }


def structure_digest(structure: PackingPlan) -> int:
    """Return a number that is equal on ranks whose leaves agree in paths, dtypes and shapes."""
    digest: int | None = structure.extras.get("structure")
    if digest is None:
        facts = sorted((leaf.path, str(leaf.dtype), leaf.shape) for leaf in structure.leaves)
        digest = structure.extras["structure"] = packing.digest(repr(facts))
    return digest


def comparable_leaves(flat_plan: PackingPlan) -> dict[str, tuple[Hashable, str]]:
    """Return the properties that `gather` compares, without sizes of dimension 0, for `call_mismatch`."""
    return {
        leaf.path: ((leaf.dtype, len(leaf.shape), leaf.shape[1:]), describe(leaf.dtype, leaf.shape))
        for leaf in flat_plan.leaves
    }


MAX_SHOWN = 8  # differing leaves that a message lists


def call_mismatch(
    call: str, collectives: Collectives, own: Mapping[str, tuple[Hashable, str]]
) -> DistributedOperationException:
    """Create the error for calls that differ; a collective that every rank must call."""
    calls: list[str]
    structures: list[Mapping[str, tuple[Hashable, str]]]
    calls, structures = zip(*collectives.all_gather_object((call, own)), strict=True)  # pyright: ignore[reportAssignmentType] - pairs of these
    if len(set(calls)) > 1:
        listed = ", ".join(f"rank {rank} calls `{other}`" for rank, other in enumerate(calls))
        return DistributedOperationException(f"The ranks call different collectives: {listed}.")
    paths = dict.fromkeys(path for described in structures for path in described)
    rows = [(path, [described.get(path, (None, "nothing")) for described in structures]) for path in paths]
    differing = [(path, leaves) for path, leaves in rows if len({fact for fact, _ in leaves}) > 1]
    lines = [
        f"  data{path}: " + ", ".join(f"rank {rank} has {shown}" for rank, (_, shown) in enumerate(leaves))
        for path, leaves in differing[:MAX_SHOWN]
    ]
    if len(differing) > MAX_SHOWN:
        lines.append(f"  and {len(differing) - MAX_SHOWN} more")
    return DistributedOperationException(
        f"`{call}` needs the same structure on every rank. These leaves differ:\n" + "\n".join(lines)
    )


def compare_in_debug_mode(
    collectives: Collectives, operation: str, *data: Any, detail: str = "", rows_differ: bool = False
) -> None:
    """Check that all ranks are about to call the same collective; called by every rank before each.

    Raises:
        DistributedOperationException: Calls differ. Every rank raises it, with a table of each rank's call
            site, collective and data.
    """
    leaves = (_describe(path, leaf) for part in data for path, leaf in walk(part))
    compare_calls(collectives, operation, leaves, detail=detail, rows_differ=rows_differ)


def verify_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective whose first argument is nested data, so that debug mode compares its calls.

    Raises:
        DistributedOperationException: `ACCELERATE_DEBUG_MODE` is set, and the ranks pass different shapes,
            types or structures. Every rank raises it, before the call.
    """

    @wraps(function)
    def compare_and_call(*args: Any, **kwargs: Any) -> Any:
        runtime = current_or_single()
        if runtime.debug and runtime.collectives.world_size > 1:
            data = args[0] if args else kwargs["tensor"]
            compare_in_debug_mode(runtime.collectives, function.__name__, data)
        return function(*args, **kwargs)

    return compare_and_call


def chained_operation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that calls collectives, so that their errors also name the function."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except DistributedOperationException as error:
            name = f"{function.__module__}.{function.__name__}"
            raise type(error)(
                f"Error found while calling `{name}`. Please see the earlier error for more details."
            ) from error

    return call


def _describe(path: str, leaf: Any) -> Description:
    if isinstance(leaf, torch.Tensor):
        return path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    return path, type(leaf).__name__, None
