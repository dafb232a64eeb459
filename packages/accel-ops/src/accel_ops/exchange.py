"""Gathering leaves from all ranks, whose sizes of dimension 0 may differ, in one collective if it can be.

Every rank sends a chunk of the same size: a prefix of four numbers (a hash of the structure, a hash of the
sizes of dimension 0, the number of leaves, the bytes it needs), these sizes, and the data. Ranks learn from
the prefixes whether they agree, and whether everything was in the chunk; if not, a second collective of the
right size follows. The size of the first chunk is guessed from what followed the last time, on grounds that
all ranks share: in a loop the guess is right from the second round on.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops import plan
from accel_ops.packing import MAX_INDEX, below_autograd, pack, section, size_of
from accel_ops.plan import describe
from accel_state.errors import DistributedOperationException

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from accel_ops.packing import Plan
    from accel_ops.plan import Bucket
    from accel_state.backends.base import Collectives

PREFIX = 32  # bytes: four 64-bit numbers
SMALLEST = 1 << 10  # bytes of the smallest first chunk
LARGEST = (
    1 << 18
)  # bytes of the largest first chunk: beyond that a second message costs less than a wrong guess
MAX_GUESSES = 1024
SHOWN = 8  # differing leaves that a message lists
# How to move groups of bytes in as few elements as possible, by their size modulo 8.
_CARRIERS = (
    torch.int64,
    torch.uint8,
    torch.int16,
    torch.uint8,
    torch.int32,
    torch.uint8,
    torch.int16,
    torch.uint8,
)


@dataclass(slots=True)
class Guess:
    """How large the first chunk of the next gather is; all ranks hold equal ones.

    A guess may depend only on what all ranks know, or chunks would differ in size: on the structure that was
    gathered last, not on the one that this rank is about to gather.
    """

    last: int = 0
    after: dict[int, int] = field(default_factory=dict[int, int])

    def capacity(self) -> int:
        """Bytes of the first chunk."""
        return self.after.get(self.last, SMALLEST)

    def learn(self, structure: int, need: int) -> None:
        """Remember what was gathered.

        Args:
            structure: The hash of the structure, or any number that all ranks share.
            need: Bytes of the largest chunk that any rank needed.
        """
        if len(self.after) >= MAX_GUESSES:
            self.after.clear()
        fits = need <= LARGEST
        self.after[self.last] = max(SMALLEST, 1 << (need - 1).bit_length()) if fits else SMALLEST
        self.last = structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a rank sends in front of its data.

    Attributes:
        structure: Hash of paths, types and shapes but for dimension 0.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutter:
    """How to get the leaves of one bucket out of the chunks of all ranks.

    Attributes:
        ranks: The bucket of every rank.
        joined: Their members after gathering: rows are those of all ranks.
        order: Which group of rows comes where, or None if they lie in order or are too many for an index.
        width: Bytes of such a group.
    """

    ranks: tuple[Bucket, ...]
    joined: Bucket
    order: Tensor | None
    width: int


_guesses: tuple[Any, Guess] = (None, Guess())


def gather(
    collectives: Collectives, flat_plan: Plan, leaves: list[Tensor], device: torch.device
) -> list[Tensor]:
    """Gather leaves whose sizes of dimension 0 may differ between ranks.

    Args:
        collectives: How to talk to the others.
        flat_plan: The plan of the structure.
        leaves: Its leaves, on any device.
        device: Where the collective runs.

    Returns:
        For every leaf the concatenation over the ranks, on `device`.

    Raises:
        DistributedOperationException: The ranks' structures differ; raised on every rank.
    """
    header = _header(flat_plan, device)
    guess = _guess(collectives)
    grid = _exchange(collectives, header, flat_plan, leaves, guess.capacity(), device)
    prefixes: list[list[int]] = grid.view(torch.int64)[:, :4].tolist()
    if any(prefix[0] != header.structure for prefix in prefixes):
        guess.learn(0, SMALLEST)
        raise mismatch("gather", collectives, _essentials(flat_plan))
    need = max(prefix[3] for prefix in prefixes)
    guess.learn(header.structure, need)
    even = all(prefix[1] == header.sizes for prefix in prefixes)
    if need > grid.shape[1]:
        if even:
            return gather_even(collectives, flat_plan, leaves, device)
        grid = _exchange(collectives, header, flat_plan, leaves, _aligned(need), device)
    if even:
        cutters = _even_cutters(flat_plan, flat_plan.buckets, collectives.world_size, device)
    else:
        cutters = _uneven_cutters(flat_plan, grid, tuple(prefix[1] for prefix in prefixes))
    return _cut_out(cutters, grid, header.start, len(leaves))


def gather_even(
    collectives: Collectives, flat_plan: Plan, leaves: list[Tensor], device: torch.device
) -> list[Tensor]:
    """Gather leaves that have the same shape on every rank: no exchange of shapes, large leaves uncopied.

    Args:
        collectives: How to talk to the others.
        flat_plan: The plan of the structure.
        leaves: Its leaves, on any device.
        device: Where the collectives run.
    """
    world_size = collectives.world_size
    results: list[Tensor]
    if flat_plan.packed:
        size = _aligned(size_of(flat_plan.packed))
        chunk = torch.empty(size, dtype=torch.uint8, device=device)
        pack(flat_plan.packed, leaves, chunk)
        grid = torch.empty((world_size, size), dtype=torch.uint8, device=device)
        collectives.all_gather_into(grid.view(-1), chunk)
        cutters = _even_cutters(flat_plan, flat_plan.packed, world_size, device)
        results = _cut_out(cutters, grid, 0, len(leaves))
    else:
        results = list(leaves)
    for index in flat_plan.large:
        leaf = leaves[index].detach().to(device).contiguous()
        results[index] = leaf.new_empty((world_size * leaf.shape[0], *leaf.shape[1:]))
        collectives.all_gather_into(results[index].view(-1), leaf.view(-1))
    return results


def mismatch(
    operation: str, collectives: Collectives, mine: Mapping[str, tuple[Hashable, str]]
) -> DistributedOperationException:
    """The error for structures that differ; every rank must ask for it at the same time.

    Args:
        operation: What was called.
        collectives: How to talk to the others.
        mine: For every path of this rank's structure, what must agree, and what to show.
    """
    everyone: list[Mapping[str, tuple[Hashable, str]]] = collectives.all_gather_object(mine)
    paths = dict.fromkeys(path for described in everyone for path in described)
    rows = [(path, [described.get(path, (None, "nothing")) for described in everyone]) for path in paths]
    differing = [(path, found) for path, found in rows if len({fact for fact, _ in found}) > 1]
    lines = [
        f"  data{path}: " + ", ".join(f"rank {rank} has {shown}" for rank, (_, shown) in enumerate(found))
        for path, found in differing[:SHOWN]
    ]
    if len(differing) > SHOWN:
        lines.append(f"  and {len(differing) - SHOWN} more")
    return DistributedOperationException(
        f"`{operation}` needs the same structure on every rank. These leaves differ:\n" + "\n".join(lines)
    )


def _essentials(flat_plan: Plan) -> dict[str, tuple[Hashable, str]]:
    """What `gather` compares, for `mismatch`: everything but the sizes of dimension 0."""
    return {
        leaf.path: ((leaf.dtype, len(leaf.shape), leaf.shape[1:]), describe(leaf.dtype, leaf.shape))
        for leaf in flat_plan.leaves
    }


def _guess(collectives: Collectives) -> Guess:
    """The guess that belongs to these ranks; another run starts with a new one."""
    global _guesses  # noqa: PLW0603 - memory of this process about its peers
    if _guesses[0] is not collectives:
        _guesses = (collectives, Guess())
    return _guesses[1]


def _header(flat_plan: Plan, device: torch.device) -> Header:
    header = flat_plan.extras.get(device)
    if header is None:
        rows = [count for bucket in flat_plan.buckets for count in bucket.rows]
        structure = plan.signature(flat_plan.leaves)
        sizes = plan.digest(repr(rows))
        start = _aligned(PREFIX + 8 * len(rows))
        nbytes = start + flat_plan.nbytes
        content = struct.pack(f"<{4 + len(rows)}q", structure, sizes, len(rows), nbytes, *rows)
        header = flat_plan.extras[device] = Header(
            structure=structure,
            sizes=sizes,
            start=start,
            nbytes=nbytes,
            content=torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device),
        )
    return header


def _exchange(
    collectives: Collectives,
    header: Header,
    flat_plan: Plan,
    leaves: list[Tensor],
    capacity: int,
    device: torch.device,
) -> Tensor:
    """Everyone's chunk, one row a rank; only its prefix where it did not fit."""
    chunk = torch.empty(capacity, dtype=torch.uint8, device=device)
    if header.nbytes <= capacity:
        chunk[: len(header.content)].copy_(header.content)
        pack(flat_plan.buckets, leaves, chunk, header.start)
    else:
        chunk[:PREFIX].copy_(header.content[:PREFIX])
    grid = torch.empty((collectives.world_size, capacity), dtype=torch.uint8, device=device)
    collectives.all_gather_into(grid.view(-1), chunk)
    return grid


def _even_cutters(
    flat_plan: Plan, buckets: tuple[Bucket, ...], world_size: int, device: torch.device
) -> list[Cutter]:
    key = (world_size, device, buckets is flat_plan.packed)
    cutters = flat_plan.extras.get(key)
    if cutters is None:
        cutters = flat_plan.extras[key] = [_cutter((bucket,) * world_size, device) for bucket in buckets]
    return cutters


def _uneven_cutters(flat_plan: Plan, grid: Tensor, sizes: tuple[int, ...]) -> list[Cutter]:
    key = (sizes, grid.device)
    cutters = flat_plan.extras.get(key)
    if cutters is None:
        count = len(flat_plan.leaves)
        tables: list[list[int]] = grid.view(torch.int64)[:, 4 : 4 + count].tolist()
        by_rank = [plan.place(flat_plan.buckets, rows) for rows in tables]
        cutters = [_cutter(same, grid.device) for same in zip(*by_rank, strict=True)]
        if len(flat_plan.extras) < MAX_GUESSES:
            flat_plan.extras[key] = cutters
    return cutters


def _cutter(ranks: tuple[Bucket, ...], device: torch.device) -> Cutter:
    first = ranks[0]
    totals = [sum(rows) for rows in zip(*(bucket.rows for bucket in ranks), strict=True)]
    joined = plan.place([first], totals)[0]
    order, width = None, 0
    if len(first.members) > 1 and joined.row_bytes:
        unit = plan.common_rows([bucket.rows for bucket in ranks])
        if sum(totals) // unit <= MAX_INDEX:
            order = torch.tensor(plan.interleave([bucket.rows for bucket in ranks], unit), device=device)
            width = unit * joined.row_bytes
    return Cutter(ranks=ranks, joined=joined, order=order, width=width)


def _cut_out(cutters: Sequence[Cutter], grid: Tensor, start: int, count: int) -> list[Tensor]:
    results: list[Any] = [None] * count
    with below_autograd():
        for cutter in cutters:
            for index, leaf in zip(cutter.joined.members, _members(cutter, grid, start), strict=True):
                results[index] = leaf
    return results


def _members(cutter: Cutter, grid: Tensor, start: int) -> Sequence[Tensor]:
    """The leaves of a bucket, joined over the ranks."""
    joined = cutter.joined
    shape = (sum(joined.rows), *joined.trailing)
    if joined.start == joined.stop:
        return grid.new_empty(shape, dtype=joined.dtype).split_with_sizes(joined.rows)
    if cutter.order is None and len(joined.members) > 1:
        by_rank = [
            section(row, bucket, start).split_with_sizes(bucket.rows)
            for row, bucket in zip(grid, cutter.ranks, strict=True)
        ]
        return [torch.cat(parts) for parts in zip(*by_rank, strict=True)]
    block = _block(cutter.ranks, grid, start)
    if cutter.order is not None:
        carrier = _CARRIERS[cutter.width % 8]
        groups = block.view(carrier).view(-1, cutter.width // carrier.itemsize)
        block = groups.index_select(0, cutter.order).view(-1).view(torch.uint8)
    return block.view(joined.dtype).view(shape).split_with_sizes(joined.rows)


def _block(ranks: Sequence[Bucket], grid: Tensor, start: int) -> Tensor:
    """The bytes of a bucket, rank after rank."""
    first = ranks[0]
    if all(bucket is first for bucket in ranks):
        return grid[:, start + first.start : start + first.stop].reshape(-1)
    return torch.cat([row[start + b.start : start + b.stop] for row, b in zip(grid, ranks, strict=True)])


def _aligned(nbytes: int) -> int:
    """The next multiple of 16, the largest element size."""
    return -(-nbytes // 16) * 16
