"""Pack nested data into one flat buffer, and unpack it as views.

Leaves that can be concatenated (same dtype, same shape except for dimension 0) form a bucket; a buffer holds
the buckets one after the other. Buckets are ordered by element size, largest first, so that each starts at a
multiple of its element size without padding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops import tree
from accel_state.frozen import frozen
from accel_state.torch_private import not_views

LARGE = 1 << 20
"""Bytes from which a leaf is sent separately without a copy: a copy would cost more than a message."""


@frozen
class Leaf:
    """One tensor of nested data: its path, dtype and shape."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Size of dimension 0; a 0-d tensor counts as one row."""
        return self.shape[0] if self.shape else 1

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@frozen
class Bucket:
    """Leaves that are contiguous in a buffer.

    Attributes:
        dtype: Their dtype.
        scalar: Whether they are 0-d.
        trailing: Their shape without dimension 0.
        members: Their indices among all leaves, in the order of the buffer.
        rows: Their sizes of dimension 0, in the same order.
        start: Offset of the bucket, in bytes.
        stop: Offset of its end, in bytes.
        shape: The shape of the bucket: its members concatenated along dimension 0.
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

    The order depends on the leaves' paths, dtypes and shapes without dimension 0, not on the order of
    `leaves`: ranks that built their dicts in different orders have the same layout.
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
    """Return buckets with other sizes of dimension 0, such as the sizes of another rank, or of all ranks."""
    placed: list[Bucket] = []
    start = offset = 0
    for bucket in buckets:
        counts = tuple(rows[offset : offset + len(bucket.members)])
        stop = start + sum(counts) * bucket.row_bytes
        scalar = bucket.scalar and scalars
        placed.append(replace(bucket, rows=counts, start=start, stop=stop, scalar=scalar))
        start, offset = stop, offset + len(counts)
    return tuple(placed)


def split_large(leaves: Sequence[Leaf]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the indices of the packed leaves, and of the leaves sent separately, ordered by path."""
    order = sorted(range(len(leaves)), key=lambda index: leaves[index].path)
    large = tuple(index for index in order if leaves[index].nbytes >= LARGE)
    return tuple(index for index in order if leaves[index].nbytes < LARGE), large


def interleave(ranks: Sequence[Sequence[Bucket]], start: int, stride: int) -> list[tuple[int, int]]:
    """Return the slices of every leaf in the chunks of all ranks, in rank order.

    Returns:
        Offset and length of every slice, in bytes, leaf by leaf in the order of the buffer.

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
    """Return the concatenated slices as indices of units.

    Example:
        >>> index_of([(0, 8), (24, 12)], 4)
        [0, 1, 6, 7, 8]
    """
    return [
        index for offset, length in segments for index in range(offset // unit, (offset + length) // unit)
    ]


def signature(leaves: Sequence[Leaf]) -> int:
    """Hash the properties that must be equal on all ranks: paths, dtypes, shapes without dimension 0."""
    facts = sorted((leaf.path, str(leaf.dtype), len(leaf.shape), leaf.shape[1:]) for leaf in leaves)
    return digest(repr(facts))


def describe(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Describe a leaf, such as `float32[2, 3]`."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def digest(text: str) -> int:
    """Hash a text to a non-negative 63-bit number, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


if TYPE_CHECKING:
    Restore = Callable[[Sequence[Tensor]], Sequence[Tensor]]

below_autograd = not_views()

MAX_PLANS = 256  # structures cached
MAX_CACHED = 1 << 18  # bytes of the largest buffer that is cached with a plan
MAX_CACHED_BYTES = 1 << 25  # cached with all plans together

_TENSORS = {Tensor}
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


@dataclass(slots=True, kw_only=True)
class PackingPlan:
    """The layout of the leaves of a structure in a buffer.

    Attributes:
        leaves: Path, dtype and shape of every leaf, in the order of the structure.
        buckets: The layout of all leaves.
        nbytes: Bytes of all leaves.
        packed: The layout of the leaves that are not large.
        large: Indices of the leaves that are sent separately.
        restore: Permutes leaves from bucket order to the order of the structure.
        restore_packed: The same for packed leaves followed by the large ones.
        extras: Values that callers cache with the plan, by key.
        cached_bytes: Bytes of the tensors in `extras`.
    """

    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    nbytes: int
    packed: tuple[Bucket, ...]
    large: tuple[int, ...]
    restore: Restore
    restore_packed: Restore
    extras: dict[Any, Any] = field(default_factory=dict[Any, Any])
    cached_bytes: int = 0

    def clear_cache(self) -> None:
        """Drop the values that are cached with the plan."""
        self.extras.clear()
        self.cached_bytes = 0


@frozen
class Flat:
    """Flattened nested data: its leaves, and the plan that packs them."""

    data: Any
    spec: Any
    leaves: list[Tensor]
    plan: PackingPlan

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the same structure with other leaves."""
        return _rebuild(self.spec, self.data, iter(leaves))


@frozen
class Buffer:
    """A flat buffer of leaves."""

    content: Tensor
    buckets: tuple[Bucket, ...]
    sections: list[Tensor]
    members: list[Tensor] = field(default_factory=list[Tensor])

    def fill(self, leaves: list[Tensor]) -> None:
        """Copy leaves, from any device, into the buffer."""
        with below_autograd():
            for bucket, section in zip(self.buckets, self.sections, strict=True):
                if bucket.start == bucket.stop:
                    continue
                parts = _pick(bucket.members, leaves)
                join = torch.stack if bucket.scalar else torch.cat
                try:
                    join(parts, out=section)
                except RuntimeError:
                    if all(part.device == section.device for part in parts):
                        raise
                    section.copy_(join([part.to(section.device) for part in parts]))


_plans: dict[Any, PackingPlan] = {}


def flatten(data: Any, operation: str) -> Flat:
    """Flatten nested data."""
    leaves: list[Tensor] = []
    try:
        spec = _flatten_leaves(data, leaves)
    except _StrayLeafError:
        raise tree.stray_leaf(data, operation) from None
    if any(leaf.is_nested or leaf.layout is not torch.strided for leaf in leaves):
        path, leaf = next((p, t) for p, t in tree.walk(data) if t.is_nested or t.layout is not torch.strided)
        remedy = "to_padded_tensor()" if leaf.is_nested else "to_dense()"
        raise TypeError(
            f"{operation}(): data{path} is a sparse or nested tensor, but collectives take dense ones. "
            f"Pass its {remedy}."
        )
    key = (spec, tuple(map(_shape_of, leaves)), tuple(map(_dtype_of, leaves)))
    known = _plans.get(key)
    if known is None:
        known = _plans[key] = make_plan(
            [Leaf(path=path, dtype=leaf.dtype, shape=tuple(leaf.shape)) for path, leaf in tree.walk(data)]
        )
        while len(_plans) > MAX_PLANS:
            del _plans[next(iter(_plans))]
    return Flat(data=data, spec=spec, leaves=leaves, plan=known)


def make_plan(leaves: Sequence[Leaf]) -> PackingPlan:
    """Lay out the leaves of a structure."""
    buckets = lay_out(leaves)
    small, large = split_large(leaves)
    packed = lay_out(leaves, small) if large else buckets
    return PackingPlan(
        leaves=tuple(leaves),
        buckets=buckets,
        nbytes=size_of(buckets),
        packed=packed,
        large=large,
        restore=_restorer(buckets),
        restore_packed=_restorer(packed, large),
    )


def size_of(buckets: Sequence[Bucket]) -> int:
    """Return the bytes of a buffer of these buckets."""
    return buckets[-1].stop if buckets else 0


def make_buffer(
    buckets: tuple[Bucket, ...], device: torch.device, *, start: int = 0, capacity: int | None = None
) -> Buffer:
    """Allocate an uninitialised buffer for leaves."""
    size = start + size_of(buckets) if capacity is None else capacity
    content = torch.empty(size, dtype=torch.uint8, device=device)
    return Buffer(content=content, buckets=buckets, sections=sections(buckets, content, start))


def cached_buffer(
    owner: PackingPlan,
    key: Hashable,
    buckets: tuple[Bucket, ...],
    device: torch.device,
    *,
    capacity: int,
    start: int = 0,
) -> tuple[Buffer, bool]:
    """Return a buffer for use during the call only: if it is small, the buffer of the last call.

    Reused only on the CPU: elsewhere a call on another stream might overwrite it while the last call reads.
    """
    slot = (key, device)
    cached: Buffer | None = owner.extras.get(slot)
    if cached is not None and len(cached.content) == capacity:
        return cached, False
    with torch.inference_mode(mode=False):  # else later calls could not write to the buffer
        made = make_buffer(buckets, device, start=start, capacity=capacity)
    if capacity <= MAX_CACHED and device.type == "cpu":
        cache(owner, slot, made, capacity)
    return made, True


def cache(owner: PackingPlan, key: Hashable, value: Any, nbytes: int) -> None:
    """Cache a value with a plan; above a limit for all plans, the caches of the oldest plans are cleared."""
    total = sum(known.cached_bytes for known in _plans.values()) + nbytes
    for known in [*_plans.values(), owner]:
        if total <= MAX_CACHED_BYTES:
            break
        total -= known.cached_bytes
        known.clear_cache()
    owner.extras[key] = value
    owner.cached_bytes += nbytes


def sections(buckets: Sequence[Bucket], content: Tensor, start: int = 0) -> list[Tensor]:
    """View the buckets in a flat buffer, with their dtypes and shapes."""
    views: list[Tensor] = []
    for dtype, group in groupby(buckets, attrgetter("dtype")):
        same = list(group)
        typed = content[: start + same[-1].stop].view(dtype)
        first = typed.storage_offset() + start // dtype.itemsize
        views += [
            typed.as_strided(bucket.shape, bucket.strides, first + bucket.start // dtype.itemsize)
            for bucket in same
        ]
    return views


def cut_all(buckets: Sequence[Bucket], blocks: Sequence[Tensor]) -> list[Tensor]:
    """View the leaves of each bucket with their shapes."""
    leaves: list[Tensor] = []
    for bucket, block in zip(buckets, blocks, strict=True):
        leaves += block.unbind() if bucket.scalar else block.split_with_sizes(bucket.rows)
    return leaves


def _restorer(buckets: Sequence[Bucket], large: Sequence[int] = ()) -> Restore:
    order = [*(index for bucket in buckets for index in bucket.members), *large]
    if order == list(range(len(order))):
        return lambda leaves: leaves
    return itemgetter(*sorted(range(len(order)), key=order.__getitem__))


def _pick(members: tuple[int, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    if len(members) == 1:
        return (leaves[members[0]],)
    return itemgetter(*members)(leaves)


class _StrayLeafError(Exception):
    """A leaf that is not a tensor."""


def _flatten_leaves(data: Any, leaves: list[Tensor]) -> Any:
    """Collect the tensors; return a hashable description of the structure around them."""
    kind = type(data)
    if isinstance(data, Tensor):
        leaves.append(data)
        return None
    keys: tuple[Any, ...] | None = None
    if kind is dict:
        keys, values = tuple(data), data.values()
    elif kind is list or kind is tuple:
        values = data
    else:
        inside = tree.children(data)
        if inside is None:
            raise _StrayLeafError
        keys, values = tuple(key for key, _ in inside), [value for _, value in inside]
    if set(map(type, values)) == _TENSORS:
        leaves.extend(values)
        return kind, keys, len(values)
    return kind, keys, tuple([_flatten_leaves(value, leaves) for value in values])


def _rebuild(spec: Any, data: Any, leaves: Iterator[Any]) -> Any:
    if spec is None:
        return next(leaves)
    _, _, inside = spec
    if isinstance(inside, int):
        return tree.rebuild(data, list(islice(leaves, inside)))
    parts = tree.children(data) or ()
    return tree.rebuild(
        data, [_rebuild(part, value, leaves) for part, (_, value) in zip(inside, parts, strict=True)]
    )
