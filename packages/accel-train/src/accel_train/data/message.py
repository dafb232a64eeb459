"""A batch as one flat buffer of bytes: what the main process sends to one other process."""

from __future__ import annotations

import io
import pickle  # what is unpickled was pickled by rank 0 of the same run
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accel_ops.packing import below_autograd
from accel_ops.tree import is_dataclass_instance, recursively_apply
from accel_train.data.iterable_shard import Delivery

if TYPE_CHECKING:
    from collections.abc import Sequence

ALIGNMENT = 16


class Next(IntEnum):
    """What follows a message."""

    END = 0
    """Nothing."""
    SAME = 1
    """A message with the same layout, in any shapes."""
    NOTICE = 2
    """An object: a new layout, or an error."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a leaf of a batch was: a tensor of some type, or any other object.

    Args:
        dtype: The type of the tensor's elements, or None for an object.
        dims: The number of its dimensions.
    """

    dtype: torch.dtype | None = None
    dims: int = 0


@dataclass(slots=True)
class Parcel:
    """A part of a round, taken apart for sending.

    Args:
        layout: The batch with a `Hole` for every leaf.
        tensors: The leaves that are tensors, in order.
        objects: The other leaves, pickled; empty if there are none.
        facts: Whether there is a batch, how many rows of it are real, and how many those of the round; -1 for
            what is not known.
    """

    layout: Any
    tensors: list[Tensor]
    objects: bytes
    facts: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of the message, header included."""
        tensors = sum(_aligned(tensor.nbytes) for tensor in self.tensors)
        return _header_bytes(self.tensors) + tensors + _aligned(len(self.objects))


def take_apart(delivery: Delivery | None) -> Parcel:
    """Take a batch apart.

    Args:
        delivery: Nested tensors and picklable objects, and what is known of the rows; None for no batch.
    """
    if delivery is None:
        return Parcel(None, [], b"", (0, -1, -1))
    tensors: list[Tensor] = []
    objects: list[Any] = []

    def dig(leaf: Any) -> Hole:
        # Others are pickled: sparse and nested tensors, and tensors with a meaning of their own.
        if type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested:
            tensors.append(leaf)
            return Hole(leaf.dtype, leaf.dim())
        objects.append(leaf)
        return Hole()

    layout = recursively_apply(dig, delivery.batch, test_type=_is_leaf)
    known = [-1 if count is None else count for count in (delivery.real, delivery.real_in_round)]
    return Parcel(layout, tensors, _to_bytes(objects), (1, known[0], known[1]))


@torch.no_grad()
def write(parcel: Parcel, buffer: Tensor, following: Next, following_bytes: int, *, is_last: bool) -> None:
    """Write a message.

    Args:
        parcel: What to send.
        buffer: uint8, at least `parcel.nbytes`.
        following: What comes next.
        following_bytes: How large the message is that comes next.
        is_last: Whether the receiver gets no batch after this one.
    """
    shapes = [size for tensor in parcel.tensors for size in tensor.shape]
    header = [following, following_bytes, is_last, *parcel.facts, len(parcel.objects), *shapes]
    buffer[: 8 * len(header)].view(torch.int64).copy_(torch.tensor(header))
    start = _header_bytes(parcel.tensors)
    for tensor in parcel.tensors:
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += _aligned(tensor.nbytes)
    if parcel.objects:
        end = start + len(parcel.objects)
        buffer[start:end].copy_(torch.frombuffer(bytearray(parcel.objects), dtype=torch.uint8))


@dataclass(slots=True)
class Letter:
    """A message as it was read.

    Args:
        delivery: The batch, if there is one.
        is_last: Whether no batch comes after this one.
        following: What comes next.
        following_bytes: How large the message is that comes next; 0 if none does.
    """

    delivery: Delivery | None
    is_last: bool
    following: Next
    following_bytes: int


def read(buffer: Tensor, layout: Any) -> Letter:
    """Read a message; its tensors share the buffer's memory.

    Args:
        buffer: What was received.
        layout: The layout of the batch.
    """
    holes: list[Hole] = []
    recursively_apply(holes.append, layout, test_type=_is_hole)
    dims = sum(hole.dims for hole in holes)
    header: list[int] = buffer[: 8 * (_FIXED + dims)].view(torch.int64).tolist()
    following, following_bytes, is_last, there, real, real_in_round, objects_bytes, *sizes = header
    start = _aligned(8 * len(header))
    leaves: list[Any] = []
    place = 0
    with below_autograd():  # in-place changes of one tensor do not concern the others
        for hole in holes:
            if hole.dtype is None:
                leaves.append(None)
                continue
            shape = sizes[place : place + hole.dims]
            place += hole.dims
            flat = buffer[start : start + _size(shape) * hole.dtype.itemsize]
            leaves.append(flat.view(hole.dtype).view(shape))
            start += _aligned(flat.nbytes)
    if objects_bytes:
        objects = iter(_from_bytes(buffer[start : start + objects_bytes].numpy().tobytes()))
        leaves = [
            next(objects) if hole.dtype is None else leaf for hole, leaf in zip(holes, leaves, strict=True)
        ]
    filling = iter(leaves)
    batch = recursively_apply(lambda _: next(filling), layout, test_type=_is_hole)
    known = [None if count < 0 else count for count in (real, real_in_round)]
    delivery = Delivery(batch, known[0], known[1]) if there else None
    return Letter(delivery, bool(is_last), Next(following), following_bytes)


_FIXED = 7  # numbers in a header before the shapes


def _header_bytes(tensors: Sequence[Tensor]) -> int:
    return _aligned(8 * (_FIXED + sum(tensor.dim() for tensor in tensors)))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _to_bytes(objects: list[Any]) -> bytes:
    if not objects:
        return b""
    if not any(isinstance(item, Tensor) for item in objects):
        return b"p" + pickle.dumps(objects)
    # Plain pickle would leave every sparse tensor on a list of torch's, to be validated by its next `load`.
    file = io.BytesIO(b"t")
    file.seek(1)
    torch.save(objects, file)
    return file.getvalue()


def _from_bytes(content: bytes) -> list[Any]:
    """Undo `_to_bytes`; the content is from rank 0 of this run."""
    if content[:1] == b"p":
        return pickle.loads(content[1:])  # noqa: S301 - see above
    return torch.load(io.BytesIO(content[1:]), weights_only=False)


def _is_leaf(data: Any) -> bool:
    return not is_dataclass_instance(data)


def _is_hole(leaf: Any) -> bool:
    return type(leaf) is Hole
