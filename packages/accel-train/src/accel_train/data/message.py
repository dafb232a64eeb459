"""A batch as one flat buffer of bytes: what the main process sends to one other process."""

from __future__ import annotations

import io
import math
import pickle  # what is unpickled was pickled by rank 0 of the same run
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from accel_ops.packing import below_autograd, copy_all
from accel_train.data.batch_spec import BatchSpec
from accel_train.data.iterable_shard import BatchWithMeta

ALIGNMENT = 16
_FIXED = 7  # numbers in a header before the shapes


class Next(IntEnum):
    """What follows a message."""

    END = 0
    """Nothing."""
    SAME = 1
    """A message with the same layout, in any shapes."""
    NOTICE = 2
    """An object: a new layout, or an error."""


@dataclass(slots=True)
class TensorPayload:
    """The flattened batches of one rank in a round, for sending.

    Args:
        facts: Whether there is a batch, how many rows of it are real, and how many those of the round; -1 for
            what is not known.
        nbytes: Bytes of the message, header included.
    """

    template: BatchSpec
    tensors: list[Tensor]
    objects: bytes
    facts: tuple[int, int, int]
    shapes: list[int]
    nbytes: int


def flatten_batch(loaded: BatchWithMeta | None, template: BatchSpec | None = None) -> TensorPayload:
    """Take a batch apart."""
    batch = None if loaded is None else loaded.batch
    leaves = None if template is None else template.take(batch)
    if template is None or leaves is None:
        template = BatchSpec.of(batch)
        leaves = template.take(batch) or []
    is_tensor = [tensor_spec.dtype is not None for tensor_spec in template.tensor_specs]
    tensors = [*compress(leaves, is_tensor)]
    objects = [leaf for leaf, one in zip(leaves, is_tensor, strict=True) if not one]
    content = _to_bytes(objects) if loaded is not None and objects else b""
    facts = (0, -1, -1) if loaded is None else (1, _known(loaded.real), _known(loaded.real_in_step))
    shapes = [size for tensor in tensors for size in tensor.shape]
    nbytes = _header_bytes(len(shapes)) + sum([_aligned(tensor.nbytes) for tensor in tensors])
    return TensorPayload(template, tensors, content, facts, shapes, nbytes + _aligned(len(content)))


class Slot:
    """The buffer of one receiver, as large as every message that is written to it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._written: tuple[BatchSpec, list[int]] | None = None
        self._header = buffer[:0]
        self._views: list[Tensor] = []

    def write(self, parcel: TensorPayload, following: Next, following_bytes: int, *, is_last: bool) -> None:
        """Write a message, what follows it, and whether the receiver gets no batch after this one."""
        if self._written != (parcel.template, parcel.shapes):
            self._lay_out(parcel)
        header = [following, following_bytes, is_last, *parcel.facts, len(parcel.objects), *parcel.shapes]
        with torch.no_grad():
            self._header.copy_(torch.tensor(header))
            if parcel.tensors:
                copy_all(self._views, parcel.tensors)
        if parcel.objects:
            end = parcel.nbytes - _aligned(len(parcel.objects)) + len(parcel.objects)
            content = torch.frombuffer(bytearray(parcel.objects), dtype=torch.uint8)
            self.buffer[end - len(parcel.objects) : end].copy_(content)

    def _lay_out(self, parcel: TensorPayload) -> None:
        self._header = self.buffer[: 8 * (_FIXED + len(parcel.shapes))].view(torch.int64)
        start = _header_bytes(len(parcel.shapes))
        self._views = []
        for tensor in parcel.tensors:
            offset = self.buffer[start : start + tensor.nbytes]
            self._views.append(offset.view(tensor.dtype).view(tensor.shape))
            start += _aligned(tensor.nbytes)
        self._written = (parcel.template, parcel.shapes)


@dataclass(slots=True)
class Message:
    """A message as it was read."""

    loaded: BatchWithMeta | None
    is_last: bool
    following: Next
    following_bytes: int


def read(buffer: Tensor, template: BatchSpec) -> Message:
    """Read a message; its tensors share the buffer's memory."""
    count = _FIXED + template.dims
    header: list[int] = buffer[: 8 * count].view(torch.int64).tolist()
    following, following_bytes, is_last, has_batch, real, real_in_step, objects_bytes = header[:_FIXED]
    start, offset = _header_bytes(template.dims), _FIXED
    leaves: list[Any] = []
    with below_autograd():  # in-place changes of one tensor do not concern the others
        for tensor_spec in template.tensor_specs:
            if tensor_spec.dtype is None:
                leaves.append(None)
                continue
            shape = header[offset : offset + tensor_spec.dims]
            offset += tensor_spec.dims
            nbytes = math.prod(shape) * tensor_spec.dtype.itemsize
            leaves.append(buffer[start : start + nbytes].view(tensor_spec.dtype).view(shape))
            start += _aligned(nbytes)
    if objects_bytes:
        objects = iter(_from_bytes(buffer[start : start + objects_bytes].numpy().tobytes()))
        leaves = [
            next(objects) if tensor_spec.dtype is None else leaf
            for tensor_spec, leaf in zip(template.tensor_specs, leaves, strict=True)
        ]
    loaded = None
    if has_batch:
        batch = template.build(iter(leaves))
        loaded = BatchWithMeta(batch, None if real < 0 else real, None if real_in_step < 0 else real_in_step)
    return Message(loaded, bool(is_last), Next(following), following_bytes)


def _known(count: int | None) -> int:
    return -1 if count is None else count


def _header_bytes(dims: int) -> int:
    return _aligned(8 * (_FIXED + dims))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _to_bytes(objects: list[Any]) -> bytes:
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
