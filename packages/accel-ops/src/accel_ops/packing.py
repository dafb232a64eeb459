"""Nested data into one flat buffer and back, by plans that are made once for every structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops import plan, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from accel_ops.plan import Bucket, Leaf

# Tensors cut out of a buffer below autograd are no "views" to it: each has its own version counter, so that
# an in-place change of one result does not invalidate graphs that use another. As torch.library uses it.
below_autograd: Callable[[], Any] = torch._C._AutoDispatchBelowAutograd  # pyright: ignore[reportPrivateUsage]
copy_all: Callable[..., Any] = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

MAX_PLANS = 256  # structures remembered; a plan's indices take at most MAX_INDEX * 8 bytes
MAX_INDEX = 1 << 15  # groups of rows moved by one index; beyond that, concatenating slices is as fast

_TENSORS = {Tensor}
_describe = attrgetter("shape", "dtype")


@dataclass(slots=True)
class Plan:
    """What is known of a structure: where its leaves lie in a buffer.

    Attributes:
        leaves: Path, type and shape of every leaf, in the order of the structure.
        buckets: The layout of all leaves.
        nbytes: Bytes of all leaves.
        packed: The layout of the leaves that are not large.
        large: Indices of the leaves that travel alone.
        extras: What users of the plan computed from it, by a key of theirs.
    """

    leaves: tuple[Leaf, ...]
    buckets: tuple[Bucket, ...]
    nbytes: int
    packed: tuple[Bucket, ...]
    large: tuple[int, ...]
    extras: dict[Any, Any] = field(default_factory=dict[Any, Any])


@dataclass(slots=True)
class Flat:
    """Nested data taken apart."""

    data: Any
    spec: Any
    leaves: list[Tensor]
    plan: Plan

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """The same structure with other leaves."""
        return _rebuild(self.spec, self.data, iter(leaves))


_plans: dict[Any, Plan] = {}


def flatten(data: Any, operation: str) -> Flat:
    """Take nested data apart.

    Args:
        data: Tensors nested in lists, tuples, named tuples, mappings and dataclasses.
        operation: Who asks, for the message.

    Raises:
        TypeError: A leaf is not a tensor.
    """
    leaves: list[Tensor] = []
    try:
        spec = _take_apart(data, leaves)
    except _StrayLeafError:
        raise tree.stray_leaf(data, operation) from None
    key = (spec, tuple(map(_describe, leaves)))
    known = _plans.get(key)
    if known is None:
        known = _plans[key] = make_plan(
            [
                plan.Leaf(path=path, dtype=leaf.dtype, shape=tuple(leaf.shape))
                for path, leaf in tree.walk(data)
            ]
        )
        while len(_plans) > MAX_PLANS:
            del _plans[next(iter(_plans))]
    return Flat(data, spec, leaves, known)


def make_plan(leaves: Sequence[Leaf]) -> Plan:
    """Lay out the leaves of a structure."""
    buckets = plan.lay_out(leaves)
    small, large = plan.split_large(leaves)
    return Plan(
        leaves=tuple(leaves),
        buckets=buckets,
        nbytes=size_of(buckets),
        packed=plan.lay_out(leaves, small) if large else buckets,
        large=large,
    )


def size_of(buckets: Sequence[Bucket]) -> int:
    """Bytes of a buffer that holds these buckets."""
    return buckets[-1].stop if buckets else 0


def pack(buckets: Sequence[Bucket], leaves: list[Tensor], buffer: Tensor, start: int = 0) -> None:
    """Copy leaves to their places in a buffer.

    Args:
        buckets: Where they belong.
        leaves: All leaves of the structure.
        buffer: Bytes.
        start: Where in the buffer the first bucket begins; a multiple of 16.
    """
    with below_autograd():
        for bucket in buckets:
            if bucket.start == bucket.stop:
                continue
            place = section(buffer, bucket, start)
            parts = _pick(bucket.members, leaves)
            join = torch.stack if bucket.scalar else torch.cat
            try:
                join(parts, out=place)
            except RuntimeError:
                if all(part.device == buffer.device for part in parts):
                    raise
                place.copy_(join([part.to(buffer.device) for part in parts]))


def section(buffer: Tensor, bucket: Bucket, start: int = 0) -> Tensor:
    """The part of a buffer of bytes that belongs to a bucket, with the bucket's type and shape."""
    return buffer[start + bucket.start : start + bucket.stop].view(bucket.dtype).view(bucket.shape)


def cut(bucket: Bucket, block: Tensor) -> Sequence[Tensor]:
    """The members of a bucket with their own shapes, cut out of a tensor of the bucket's shape."""
    return block.unbind() if bucket.scalar else block.split_with_sizes(bucket.rows)


def _pick(members: tuple[int, ...], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    if len(members) == 1:
        return (leaves[members[0]],)
    return itemgetter(*members)(leaves)


class _StrayLeafError(Exception):
    """A leaf that is not a tensor."""


def _take_apart(data: Any, leaves: list[Tensor]) -> Any:
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
    return kind, keys, tuple([_take_apart(value, leaves) for value in values])


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
