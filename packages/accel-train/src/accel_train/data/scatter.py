"""Batches as messages."""

from __future__ import annotations

import io
import math
import pickle  # what is unpickled was pickled by rank 0 of the same run
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accel_ops.packing import below_autograd
from accel_ops.tree import children, is_dataclass_instance, rebuild, recursively_apply
from accel_state.collectives import Collectives
from accel_state.errors import AccelError
from accel_state.torch_private import foreach_copy_
from accel_train.data.shards import BatchWithMeta

Take: TypeAlias = Callable[[Any, list[Any]], bool]
Build: TypeAlias = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where a leaf of a batch was: a tensor of some type, or any other object."""

    dtype: torch.dtype | None = None
    dims: int = 0


def is_plain(leaf: Any) -> bool:
    """Whether this is a tensor that travels as bytes: not sparse, nested, or with a meaning of its own."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested


class BatchSpec:
    """Batches of one structure, element types and numbers of dimensions.

    Example:
        >>> template = BatchSpec.of({"ids": torch.zeros(2, 3), "name": "a"})
        >>> leaves = template.take({"ids": torch.ones(1, 1), "name": "b"})
        >>> template.build(iter(leaves))
        {'ids': tensor([[1.]]), 'name': 'b'}
        >>> template.take({"ids": torch.ones(1), "name": "b"}) is None
        True
    """

    __slots__ = ("_build", "_take", "dims", "layout", "tensor_specs")

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.tensor_specs: list[TensorSpec] = []
        self._take, self._build = _compile(layout, self.tensor_specs)
        self.dims = sum(tensor_spec.dims for tensor_spec in self.tensor_specs)

    @classmethod
    def of(cls, batch: Any) -> BatchSpec:
        """The template of a batch."""
        return cls(recursively_apply(_dig, batch, test_type=lambda data: not is_dataclass_instance(data)))

    def take(self, batch: Any) -> list[Any] | None:
        """Return the leaves of a batch in order, or None if it does not fit."""
        leaves: list[Any] = []
        return leaves if self._take(batch, leaves) else None

    def build(self, leaves: Iterator[Any]) -> Any:
        """Make a batch of leaves."""
        return self._build(leaves)


def _dig(leaf: Any) -> TensorSpec:
    return TensorSpec(leaf.dtype, leaf.dim()) if is_plain(leaf) else TensorSpec()


def _compile(layout: Any, tensor_specs: list[TensorSpec]) -> tuple[Take, Build]:
    if type(layout) is TensorSpec:
        tensor_specs.append(layout)
        return _leaf_taker(layout), next
    inside = children(layout)
    if inside is None:
        raise TypeError(f"{layout!r} is neither a hole nor a container")
    keys = [key for key, _ in inside]
    parts = [_compile(value, tensor_specs) for _, value in inside]
    builds = [build for _, build in parts]
    values, build = _access(layout, keys, builds)

    def take(data: Any, leaves: list[Any]) -> bool:
        found = values(data)
        if found is None:
            return False
        return all(part(value, leaves) for (part, _), value in zip(parts, found, strict=True))

    return take, build


def _access(layout: Any, keys: list[Any], builds: list[Build]) -> tuple[Callable[[Any], Any], Build]:
    """Return what gives the values of a container, `None` of one that does not fit; and what builds one."""
    kind = type(layout)
    if kind is dict:
        return (
            lambda data: data.values() if type(data) is dict and list(data) == keys else None,
            lambda leaves: {key: build(leaves) for key, build in zip(keys, builds, strict=True)},
        )
    if kind is list or kind is tuple:
        return (
            lambda data: data if type(data) is kind and len(data) == len(builds) else None,
            lambda leaves: kind([build(leaves) for build in builds]),
        )

    def values(data: Any) -> list[Any] | None:
        inside = children(data) if type(data) is kind else None
        fits = inside is not None and [key for key, _ in inside] == keys
        return [value for _, value in inside or ()] if fits else None

    return values, lambda leaves: rebuild(layout, [build(leaves) for build in builds])


def _leaf_taker(tensor_spec: TensorSpec) -> Take:
    if tensor_spec.dtype is None:

        def collect_object(data: Any, leaves: list[Any]) -> bool:
            leaves.append(data)
            return not is_plain(data) and children(data) is None

        return collect_object

    def collect_tensor(data: Any, leaves: list[Any]) -> bool:
        leaves.append(data)
        return is_plain(data) and data.dtype is tensor_spec.dtype and data.dim() == tensor_spec.dims

    return collect_tensor


ALIGNMENT = 16
_FIXED = 7  # numbers in a header before the shapes


class NextMessage(IntEnum):
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


class ReceiverBuffer:
    """The buffer of one receiver, as large as every message that is written to it."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._written: tuple[BatchSpec, list[int]] | None = None
        self._header = buffer[:0]
        self._views: list[Tensor] = []

    def write(
        self, parcel: TensorPayload, following: NextMessage, following_bytes: int, *, is_last: bool
    ) -> None:
        """Write a message, what follows it, and whether the receiver gets no batch after this one."""
        if self._written != (parcel.template, parcel.shapes):
            self._lay_out(parcel)
        header = [following, following_bytes, is_last, *parcel.facts, len(parcel.objects), *parcel.shapes]
        with torch.no_grad():
            self._header.copy_(torch.tensor(header))
            if parcel.tensors:
                foreach_copy_(self._views, parcel.tensors)
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
    following: NextMessage
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
    return Message(loaded, bool(is_last), NextMessage(following), following_bytes)


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


_EMPTY = BatchSpec(TensorSpec())


class MainProcessReadError(AccelError, RuntimeError):
    """The main process could not read a batch for all; it raises the error itself."""


@dataclass(frozen=True, slots=True)
class LayoutNotice:
    """What is sent as an object, when a layout is new or nothing can be sent."""

    layouts: Sequence[Any] = ()
    nbytes: int = 0
    error: str | None = None


@dataclass(slots=True)
class Round:
    """A round that is ready to be sent."""

    parts: Sequence[BatchWithMeta | None]
    parcels: Sequence[TensorPayload]
    nbytes: int


class Sender:
    """The sending side, on the main process.

    While a round is computed with, the next one is under way; and since every message says what follows
    it, the one after that is read already.
    """

    def __init__(self, rounds: Iterator[Sequence[BatchWithMeta | None]], collectives: Collectives) -> None:
        self._rounds = rounds
        self._collectives = collectives
        self._templates: list[BatchSpec | None] = [None] * (collectives.world_size - 1)
        self._slots: list[ReceiverBuffer] = []

    def pairs(self) -> Iterator[tuple[BatchWithMeta, bool]]:
        """Send round after round; yield this rank's parts, each with whether it is the last one."""
        current = self._take()
        self._announce(current)
        upcoming, arrived = self._start(current)
        while isinstance(current, Round):
            arrived()
            if _needs_notice(current, upcoming):
                self._announce(upcoming)
            after, arrived = self._start(upcoming)
            if (mine := current.parts[0]) is not None:
                yield mine, _is_last(upcoming, 0)
            current, upcoming = upcoming, after
        if current is not None:
            raise current

    def _take(self) -> Round | Exception | None:
        try:
            parts = next(self._rounds, None)
            if parts is None:
                return None
            parcels = [
                flatten_batch(part, known) for part, known in zip(parts[1:], self._templates, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises, the others must hear of it
            return error
        self._templates = [parcel.template for parcel in parcels]
        return Round(parts, parcels, max([parcel.nbytes for parcel in parcels]))

    def _announce(self, upcoming: Round | Exception | None) -> None:
        notice = None
        if isinstance(upcoming, Round):
            layouts = [parcel.template.layout for parcel in upcoming.parcels]
            notice = LayoutNotice([None, *layouts], upcoming.nbytes)
        elif upcoming is not None:
            notice = LayoutNotice(error=f"{type(upcoming).__name__}: {upcoming}")
        self._collectives.broadcast_object_list([notice], 0)

    def _start(
        self, current: Round | Exception | None
    ) -> tuple[Round | Exception | None, Callable[[], None]]:
        """Begin to send a round; return what follows it, and what waits until it was sent."""
        if not isinstance(current, Round):
            return None, _nothing
        upcoming = self._take()
        following = NextMessage.END if upcoming is None else NextMessage.SAME
        if _needs_notice(current, upcoming):
            following = NextMessage.NOTICE
        nbytes = upcoming.nbytes if isinstance(upcoming, Round) and following is NextMessage.SAME else 0
        if not self._slots or self._slots[0].buffer.numel() != current.nbytes:
            buffers = torch.empty(self._collectives.world_size, current.nbytes, dtype=torch.uint8)
            self._slots = [ReceiverBuffer(buffer) for buffer in buffers.unbind()]
        for rank, parcel in enumerate(current.parcels, start=1):
            self._slots[rank].write(parcel, following, nbytes, is_last=_is_last(upcoming, rank))
        buffers = [slot.buffer for slot in self._slots]
        return upcoming, self._collectives.start_scatter(buffers[0], buffers, 0)


class Receiver:
    """The receiving side, on every other process."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def pairs(self) -> Iterator[tuple[BatchWithMeta, bool]]:
        """Receive round after round; yield this rank's parts, each with whether it is the last one."""
        template, nbytes, error = self._hear()
        buffer, arrived = self._start(nbytes)
        while nbytes:
            arrived()
            letter = read(buffer, template)
            nbytes = letter.following_bytes
            if letter.following is NextMessage.NOTICE:
                template, nbytes, error = self._hear()
            buffer, arrived = self._start(nbytes)
            if letter.loaded is not None:
                yield letter.loaded, letter.is_last
        if error is not None:
            raise MainProcessReadError(f"The main process failed to read a batch: {error}")

    def _start(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        """Begin to receive a message; return where, and what waits until it is there."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        return buffer, self._collectives.start_scatter(buffer, None, 0) if nbytes else _nothing

    def _hear(self) -> tuple[BatchSpec, int, str | None]:
        """The structure and size of the message that comes next, or the error for which none does."""
        heard: list[LayoutNotice | None] = [None]
        self._collectives.broadcast_object_list(heard, 0)
        notice = heard[0]
        if notice is None or notice.error is not None:
            return _EMPTY, 0, None if notice is None else notice.error
        return BatchSpec(notice.layouts[self._collectives.rank]), notice.nbytes, None


def _needs_notice(current: Round, upcoming: Round | Exception | None) -> bool:
    """Whether more has to be said about what follows than fits into a message."""
    if isinstance(upcoming, Round):
        # A template is kept as long as batches fit into it.
        pairs = zip(upcoming.parcels, current.parcels, strict=True)
        return any(one.template is not other.template for one, other in pairs)
    return upcoming is not None


def _nothing() -> None:
    """There is nothing to wait for."""


def _is_last(upcoming: Round | Exception | None, rank: int) -> bool:
    """Whether a rank gets nothing more: at the end, and before a last round in which it has no part."""
    return upcoming is None or (isinstance(upcoming, Round) and upcoming.parts[rank] is None)
