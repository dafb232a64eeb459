"""Pack nested data into one flat buffer and unpack it, by plans that are cached for every structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops import plan, tree

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from accel_ops.plan import Bucket, Leaf

    Restore = Callable[[Sequence[Tensor]], Sequence[Tensor]]

# Tensors cut out of a buffer inside this guard are no "views" to autograd: each has its own version counter,
# so that an in-place change of one result does not invalidate graphs that use another. It also costs less.
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality) | torch._C.DispatchKeySet(  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    torch._C.DispatchKey.ADInplaceOrView  # pyright: ignore[reportPrivateUsage]
)
below_autograd: Callable[[], Any] = partial(torch._C._ExcludeDispatchKeyGuard, _KEYS)  # pyright: ignore[reportPrivateUsage]
copy_all: Callable[..., Any] = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]

MAX_PLANS = 256  # structures remembered
MAX_CACHED = 1 << 18  # bytes of the largest buffer that is kept with a plan
MAX_CACHED_BYTES = 1 << 25  # kept with all plans together

_TENSORS = {Tensor}
_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")


@dataclass(slots=True, kw_only=True)
class Plan:
    """The layout of the leaves of a structure in a buffer.

    Attributes:
        leaves: Path, type and shape of every leaf, in the order of the structure.
        buckets: The layout of all leaves.
        nbytes: Bytes of all leaves.
        packed: The layout of the leaves that are not large.
        large: Indices of the leaves that are sent alone.
        restore: Puts leaves that come bucket after bucket into the order of the structure.
        restore_packed: The same for packed leaves that are followed by the large ones.
        extras: What users of the plan made with it, by a key of theirs.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Flattened nested data: its leaves, and the plan that packs them."""

    data: Any
    spec: Any
    leaves: list[Tensor]
    plan: Plan

    def rebuild(self, leaves: Sequence[Any]) -> Any:
        """Return the same structure with other leaves."""
        return _rebuild(self.spec, self.data, iter(leaves))


@dataclass(frozen=True, slots=True, kw_only=True)
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


_plans: dict[Any, Plan] = {}


def flatten(data: Any, operation: str) -> Flat:
    """Flatten nested data."""
    leaves: list[Tensor] = []
    try:
        spec = _flatten_leaves(data, leaves)
    except _StrayLeafError:
        raise tree.stray_leaf(data, operation) from None
    key = (spec, tuple(map(_shape_of, leaves)), tuple(map(_dtype_of, leaves)))
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
    return Flat(data=data, spec=spec, leaves=leaves, plan=known)


def make_plan(leaves: Sequence[Leaf]) -> Plan:
    """Lay out the leaves of a structure."""
    buckets = plan.lay_out(leaves)
    small, large = plan.split_large(leaves)
    packed = plan.lay_out(leaves, small) if large else buckets
    return Plan(
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
    owner: Plan,
    key: Hashable,
    buckets: tuple[Bucket, ...],
    device: torch.device,
    *,
    capacity: int,
    start: int = 0,
) -> tuple[Buffer, bool]:
    """Return a buffer that is needed during the call only: that of the last call, if it was small.

    Only on the CPU: elsewhere a call on another stream might overwrite it while the last one still reads.
    """
    slot = (key, device)
    cached: Buffer | None = owner.extras.get(slot)
    if cached is not None and len(cached.content) == capacity:
        return cached, False
    with torch.inference_mode(mode=False):  # else later calls outside of it could not write to the buffer
        made = make_buffer(buckets, device, start=start, capacity=capacity)
    if capacity <= MAX_CACHED and device.type == "cpu":
        cache(owner, slot, made, capacity)
    return made, True


def cache(owner: Plan, key: Hashable, value: Any, nbytes: int) -> None:
    """Cache a value with a plan; the oldest plans lose theirs above a limit for all plans."""
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
    found: list[Tensor] = []
    for dtype, group in groupby(buckets, attrgetter("dtype")):
        same = list(group)
        typed = content[: start + same[-1].stop].view(dtype)
        first = typed.storage_offset() + start // dtype.itemsize
        found += [
            typed.as_strided(bucket.shape, bucket.strides, first + bucket.start // dtype.itemsize)
            for bucket in same
        ]
    return found


def cut_all(buckets: Sequence[Bucket], blocks: Sequence[Tensor]) -> list[Tensor]:
    """View the leaves with their own shapes, bucket after bucket."""
    leaves: list[Tensor] = []
    for bucket, block in zip(buckets, blocks, strict=True):
        leaves += block.unbind() if bucket.scalar else block.split_with_sizes(bucket.rows)
    return leaves


def _restorer(buckets: Sequence[Bucket], large: Sequence[int] = ()) -> Restore:
    order = [*(index for bucket in buckets for index in bucket.members), *large]
    if order == list(range(len(order))):
        return _as_they_are
    return itemgetter(*sorted(range(len(order)), key=order.__getitem__))


def _as_they_are(leaves: Sequence[Tensor]) -> Sequence[Tensor]:
    return leaves


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
