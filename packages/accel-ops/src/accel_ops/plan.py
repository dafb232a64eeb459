"""The layout of the leaves of nested data in one flat buffer: pure arithmetic on shapes.

Leaves that can be concatenated as they are (same element type, same shape but for dimension 0) form a bucket;
a buffer holds the buckets one after the other. Buckets are ordered by element size, largest first, so that
each one starts at a multiple of its own element size without padding.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

LARGE = 1 << 20
"""Bytes from which a leaf travels alone and uncopied: copying it would cost more than a message."""


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
    """Leaves that are contiguous in a buffer.

    Attributes:
        dtype: Their element type.
        scalar: Whether they have no dimension.
        trailing: Their shape without dimension 0.
        members: Their indices among all leaves, in the order in which they lie.
        rows: Their sizes of dimension 0, in the same order.
        start: Offset of the bucket, in bytes.
        stop: Offset of its end, in bytes.
        shape: The shape of all of it: the members one after the other along dimension 0.
        strides: The strides of that shape.
    """

    dtype: torch.dtype
    scalar: bool
    trailing: tuple[int, ...]
    members: tuple[int, ...]
    rows: tuple[int, ...]
    start: int
    stop: int
    shape: tuple[int, ...] = field(init=False)
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        shape = (len(self.members),) if self.scalar else (sum(self.rows), *self.trailing)
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "strides", strides)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of any member."""
        return math.prod(self.trailing) * self.dtype.itemsize


def lay_out(leaves: Sequence[Leaf], members: Iterable[int] | None = None) -> tuple[Bucket, ...]:
    """Assign leaves to buckets, and offsets to the buckets.

    The order depends on the leaves' paths, types and shapes without dimension 0, and not on the order of
    `leaves`: ranks that built their dicts in different orders lay them out alike.
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


def at_rows(buckets: Sequence[Bucket], rows: Sequence[int], *, scalars: bool = True) -> tuple[Bucket, ...]:
    """Return buckets with other sizes of dimension 0: those of another rank, or of all ranks together."""
    placed: list[Bucket] = []
    start = offset = 0
    for bucket in buckets:
        mine = tuple(rows[offset : offset + len(bucket.members)])
        stop = start + sum(mine) * bucket.row_bytes
        scalar = bucket.scalar and scalars
        placed.append(replace(bucket, rows=mine, start=start, stop=stop, scalar=scalar))
        start, offset = stop, offset + len(mine)
    return tuple(placed)


def split_large(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the leaves that are packed, and of those that are sent alone, ordered by path."""
    order = sorted(range(len(leaves)), key=lambda index: leaves[index].path)
    large = tuple(index for index in order if leaves[index].nbytes >= LARGE)
    return tuple(index for index in order if leaves[index].nbytes < LARGE), large


def interleave(ranks: Sequence[Sequence[Bucket]], start: int, stride: int) -> list[tuple[int, int]]:
    """Find the slices of every leaf in the chunks of all ranks: those of rank 0, of rank 1, and so on.

    Returns:
        Offset and length of every slice, in bytes, for leaf after leaf in the order in which they lie.

    Example:
        >>> import torch
        >>> a, b = (Leaf(path=path, dtype=torch.uint8, shape=(2,)) for path in "ab")
        >>> interleave([lay_out([a, b])] * 2, start=0, stride=10)
        [(0, 2), (10, 2), (2, 2), (12, 2)]
    """
    by_rank: list[list[tuple[int, int]]] = []
    for rank, buckets in enumerate(ranks):
        position = rank * stride + start
        segments: list[tuple[int, int]] = []
        for bucket in buckets:
            for rows in bucket.rows:
                segments.append((position, rows * bucket.row_bytes))
                position += segments[-1][1]
        by_rank.append(segments)
    return [segment for of_leaf in zip(*by_rank, strict=True) for segment in of_leaf]


def unit_of(segments: Iterable[tuple[int, int]]) -> int:
    """Return the greatest number of bytes that divides all offsets and lengths.

    Example:
        >>> unit_of([(0, 8), (24, 12)])
        4
    """
    return math.gcd(*(number for offset, length in segments if length for number in (offset, length)))


def index_of(segments: Iterable[tuple[int, int]], unit: int) -> list[int]:
    """Return the slices, one after the other, as indices of units.

    Example:
        >>> index_of([(0, 8), (24, 12)], 4)
        [0, 1, 6, 7, 8]
    """
    return [
        index for offset, length in segments for index in range(offset // unit, (offset + length) // unit)
    ]


def signature(leaves: Sequence[Leaf]) -> int:
    """Hash what ranks have to agree on: paths, dtypes and shapes without dimension 0."""
    facts = sorted((leaf.path, str(leaf.dtype), len(leaf.shape), leaf.shape[1:]) for leaf in leaves)
    return digest(repr(facts))


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Describe a leaf, such as `float32[2, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def digest(text: str) -> int:
    """Hash a text to a non-negative 63-bit number, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
