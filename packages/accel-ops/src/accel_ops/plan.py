"""Where the leaves of nested data lie in one flat buffer: pure arithmetic on shapes.

Leaves that can be concatenated as they are (same element type, same shape but for dimension 0) form a bucket;
a buffer holds the buckets one after the other. Buckets are ordered by element size, largest first, so that
each one starts at a multiple of its own element size without padding.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

LARGE = (
    1 << 20
)  # bytes from which a leaf travels alone and uncopied: copying it would cost more than a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of nested data: its path there, its element type and shape."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Size of dimension 0; a tensor without dimensions counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Leaves that lie side by side in a buffer.

    Attributes:
        dtype: Their element type.
        scalar: Whether they have no dimension.
        trailing: Their shape without dimension 0.
        members: Their indices among all leaves, in the order in which they lie.
        rows: Their sizes of dimension 0, in the same order.
        start: Offset of the bucket, in bytes.
        stop: Offset of its end, in bytes.
    """

    dtype: torch.dtype
    scalar: bool
    trailing: tuple[int, ...]
    members: tuple[int, ...]
    rows: tuple[int, ...]
    start: int
    stop: int
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.members),) if self.scalar else (sum(self.rows), *self.trailing)
        object.__setattr__(self, "shape", shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of any member."""
        return math.prod(self.trailing) * self.dtype.itemsize


def lay_out(leaves: Sequence[Leaf], members: Iterable[int] | None = None) -> tuple[Bucket, ...]:
    """Put leaves into buckets, and the buckets one after the other.

    The order depends on the leaves' paths, types and shapes without dimension 0, and not on the order of
    `leaves`: ranks that built their dicts in different orders lay them out alike.

    Args:
        leaves: All leaves.
        members: Which of them to lay out; all by default.
    """
    grouped: dict[tuple[int, str, bool, tuple[int, ...]], list[int]] = {}
    for index in range(len(leaves)) if members is None else members:
        leaf = leaves[index]
        kind = (-leaf.dtype.itemsize, str(leaf.dtype), not leaf.shape, leaf.shape[1:])
        grouped.setdefault(kind, []).append(index)
    buckets: list[Bucket] = []
    start = 0
    for kind in sorted(grouped):
        inside = sorted(grouped[kind], key=lambda index: leaves[index].path)
        stop = start + sum(leaves[index].nbytes for index in inside)
        bucket = Bucket(
            dtype=leaves[inside[0]].dtype,
            scalar=kind[2],
            trailing=kind[3],
            members=tuple(inside),
            rows=tuple(leaves[index].rows for index in inside),
            start=start,
            stop=stop,
        )
        buckets.append(bucket)
        start = stop
    return tuple(buckets)


def place(buckets: Sequence[Bucket], rows: Sequence[int]) -> tuple[Bucket, ...]:
    """The same buckets for a rank whose leaves have other sizes of dimension 0.

    Args:
        buckets: This rank's buckets.
        rows: The other rank's sizes, in the order in which the leaves lie.
    """
    placed: list[Bucket] = []
    start = taken = 0
    for bucket in buckets:
        mine = tuple(rows[taken : taken + len(bucket.members)])
        stop = start + sum(mine) * bucket.row_bytes
        placed.append(
            Bucket(
                dtype=bucket.dtype,
                scalar=bucket.scalar,
                trailing=bucket.trailing,
                members=bucket.members,
                rows=mine,
                start=start,
                stop=stop,
            )
        )
        start, taken = stop, taken + len(mine)
    return tuple(placed)


def split_large(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The indices of the leaves that are packed, and of those that travel alone, in an order of paths."""
    order = sorted(range(len(leaves)), key=lambda index: leaves[index].path)
    large = tuple(index for index in order if leaves[index].nbytes >= LARGE)
    return tuple(index for index in order if leaves[index].nbytes < LARGE), large


def common_rows(rows_by_rank: Sequence[Sequence[int]]) -> int:
    """The greatest number of rows that always stay together when leaves of several ranks are joined."""
    return math.gcd(*(count for rows in rows_by_rank for count in rows)) or 1


def interleave(rows_by_rank: Sequence[Sequence[int]], unit: int = 1) -> list[int]:
    """How to reorder what lies rank by rank so that it lies leaf by leaf.

    Args:
        rows_by_rank: For every rank, the rows of every leaf of a bucket.
        unit: How many rows make a group; a divisor of all of them.

    Returns:
        A permutation: group `i` of the result is group `permutation[i]` of the input.

    Example:
        >>> interleave([[1, 1], [1, 1]])  # leaves a, b: a0 b0 a1 b1 -> a0 a1 b0 b1
        [0, 2, 1, 3]
        >>> interleave([[2, 4], [2, 0]], unit=2)
        [0, 3, 1, 2]
    """
    starts: list[list[int]] = []
    position = 0
    for rows in rows_by_rank:
        starts.append([])
        for count in rows:
            starts[-1].append(position)
            position += count // unit
    order: list[int] = []
    for leaf in range(len(rows_by_rank[0])):
        for rank, rows in enumerate(rows_by_rank):
            first = starts[rank][leaf]
            order.extend(range(first, first + rows[leaf] // unit))
    return order


def signature(leaves: Sequence[Leaf]) -> int:
    """A number that ranks share if their leaves agree in paths, types and shapes but for dimension 0."""
    facts = sorted((leaf.path, str(leaf.dtype), len(leaf.shape), leaf.shape[1:]) for leaf in leaves)
    return digest(repr(facts))


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Such as `float32[2, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def digest(text: str) -> int:
    """A non-negative 63-bit number for a text, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
