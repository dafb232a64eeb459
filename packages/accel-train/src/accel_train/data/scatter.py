"""Scatter batches from rank 0 as byte messages: one per rank and round, two rounds ahead.

A message has a header (the kind of the next message, the number of padding samples, the shapes), the bytes of
the tensors, and the pickled objects. A `BatchSpec` is their structure; rank 0 broadcasts a `LayoutNotice`
when it changes.
"""

from __future__ import annotations

import io
import math
import pickle  # for bytes pickled by rank 0 of the same run
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import compress
from typing import Any, TypeAlias

import torch
from torch import Tensor

from accel_ops.tree import children, is_dataclass_instance, rebuild, recursively_apply
from accel_state.collectives import Collectives
from accel_state.errors import AccelError
from accel_state.torch_private import not_views
from accel_train.data.shards import BatchWithMeta


class MainProcessReadError(AccelError, RuntimeError):
    """The main process could not read a batch for all ranks; it raises the original error."""


@dataclass(slots=True)
class Round:
    """A round that is ready to be sent: the batches of all ranks, and the messages to ranks other than 0."""

    parts: Sequence[BatchWithMeta | None]
    payloads: Sequence[TensorPayload]
    nbytes: int


class Sender:
    """Send rounds of batches from rank 0.

    While the loop computes on a round, the next one is being sent, and the one after that has been read,
    since every message announces the next.
    """

    def __init__(self, rounds: Iterator[Sequence[BatchWithMeta | None]], collectives: Collectives) -> None:
        self._rounds = rounds
        self._collectives = collectives
        self._specs: list[BatchSpec | None] = [None] * (collectives.world_size - 1)
        self._receivers: list[ReceiverBuffer] = []

    def pairs(self) -> Iterator[tuple[BatchWithMeta, bool]]:
        """Send all rounds; yield the batches of rank 0, each with whether it is the last."""
        current = self._read_round()
        self._announce(current)
        upcoming, arrived = self._start(current)
        while isinstance(current, Round):
            arrived()
            if _needs_notice(current, upcoming):
                self._announce(upcoming)
            after, arrived = self._start(upcoming)
            if (local := current.parts[0]) is not None:
                yield local, _is_last(upcoming, 0)
            current, upcoming = upcoming, after
        if current is not None:
            raise current

    def _read_round(self) -> Round | Exception | None:
        """Read the next round; return the error if reading fails, `None` at the end."""
        try:
            parts = next(self._rounds, None)
            if parts is None:
                return None
            payloads = [flatten_batch(part, spec) for part, spec in zip(parts[1:], self._specs, strict=True)]
            specs = [payload.spec for payload in payloads]
            if any(spec is not before for spec, before in zip(specs, self._specs, strict=True)):
                pickle.dumps(
                    [spec.layout for spec in specs]
                )  # an error in the broadcast would be rank 0's alone
        except Exception as error:  # noqa: BLE001 - whatever a dataset raises, all ranks need the error
            return error
        self._specs = [*specs]
        return Round(parts, payloads, max([payload.nbytes for payload in payloads]))

    def _announce(self, upcoming: Round | Exception | None) -> None:
        """Broadcast the layouts of the next round, or the error that prevented it."""
        notice = None
        if isinstance(upcoming, Round):
            layouts = [payload.spec.layout for payload in upcoming.payloads]
            notice = LayoutNotice([None, *layouts], upcoming.nbytes)
        elif upcoming is not None:
            notice = LayoutNotice(error=f"{type(upcoming).__name__}: {upcoming}")
        self._collectives.broadcast_object_list([notice], 0)

    def _start(
        self, current: Round | Exception | None
    ) -> tuple[Round | Exception | None, Callable[[], None]]:
        """Start sending a round; return the next round, and a function that waits until it is sent."""
        # 1. Read the next round, which this round's messages announce.
        if not isinstance(current, Round):
            return None, _nothing
        upcoming = self._read_round()
        following = NextMessage.END if upcoming is None else NextMessage.SAME
        if _needs_notice(current, upcoming):
            following = NextMessage.NOTICE
        nbytes = upcoming.nbytes if isinstance(upcoming, Round) and following is NextMessage.SAME else 0
        # 2. Write the messages, and scatter them.
        if not self._receivers or self._receivers[0].buffer.numel() != current.nbytes:
            buffers = torch.empty(
                self._collectives.world_size, current.nbytes, dtype=torch.uint8, device="cpu"
            )
            self._receivers = [ReceiverBuffer(buffer) for buffer in buffers.unbind()]
        for rank, payload in enumerate(current.payloads, start=1):
            self._receivers[rank].write(payload, following, nbytes, is_last=_is_last(upcoming, rank))
        buffers = [receiver.buffer for receiver in self._receivers]
        return upcoming, self._collectives.start_scatter(buffers[0], buffers, 0)


class Receiver:
    """Receive the batches of this rank, on every rank but rank 0."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives

    def pairs(self) -> Iterator[tuple[BatchWithMeta, bool]]:
        """Receive all rounds; yield this rank's batches, each with whether it is the last."""
        spec, nbytes, error = self._receive_notice()
        buffer, arrived = self._start(nbytes)
        while nbytes:
            arrived()
            message = read(buffer, spec)
            nbytes = message.following_bytes
            if message.following is NextMessage.NOTICE:
                spec, nbytes, error = self._receive_notice()
            buffer, arrived = self._start(nbytes)
            if message.loaded is not None:
                yield message.loaded, message.is_last
        if error is not None:
            raise MainProcessReadError(f"The main process failed to read a batch: {error}")

    def _start(self, nbytes: int) -> tuple[Tensor, Callable[[], None]]:
        """Start receiving a message; return its buffer, and a function that waits for it."""
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return buffer, self._collectives.start_scatter(buffer, None, 0) if nbytes else _nothing

    def _receive_notice(self) -> tuple[BatchSpec, int, str | None]:
        """Receive the next message's structure and size, or rank 0's error."""
        notices: list[LayoutNotice | None] = [None]
        self._collectives.broadcast_object_list(notices, 0)
        notice = notices[0]
        if notice is None or notice.error is not None:
            return BatchSpec(TensorSpec()), 0, None if notice is None else notice.error
        return BatchSpec(notice.layouts[self._collectives.rank]), notice.nbytes, None


@dataclass(frozen=True, slots=True)
class LayoutNotice:
    """The broadcast of rank 0 when the next round has a new layout, or reading has failed."""

    layouts: Sequence[Any] = ()
    nbytes: int = 0
    error: str | None = None


def _needs_notice(current: Round, upcoming: Round | Exception | None) -> bool:
    """Return whether the next round has a new layout, or an error in its place."""
    if isinstance(upcoming, Round):  # a `BatchSpec` is reused while batches fit it
        pairs = zip(upcoming.payloads, current.payloads, strict=True)
        return any(payload.spec is not before.spec for payload, before in pairs)
    return upcoming is not None


def _is_last(upcoming: Round | Exception | None, rank: int) -> bool:
    """Return whether a rank gets no more batches: the next round is the end, or has none for it."""
    return upcoming is None or (isinstance(upcoming, Round) and upcoming.parts[rank] is None)


def _nothing() -> None:
    """Wait for nothing."""


class NextMessage(IntEnum):
    """The kind of the next message."""

    END = 0
    SAME = 1
    """A message of the same layout, in any shapes."""
    NOTICE = 2
    """A `LayoutNotice`: a new layout, or an error."""


@dataclass(slots=True)
class TensorPayload:
    """The flattened batch of one rank in a round.

    Args:
        objects: The pickled leaves that are not tensors.
        facts: Whether there is a batch, and the numbers of real rows in the batch and in the round; -1 if
            unknown.
        nbytes: Bytes of the message, header included.
    """

    spec: BatchSpec
    tensors: list[Tensor]
    objects: bytes
    facts: tuple[int, int, int]
    shapes: list[int]
    nbytes: int


def flatten_batch(loaded: BatchWithMeta | None, spec: BatchSpec | None = None) -> TensorPayload:
    """Flatten a batch with a spec, or with a new one if it does not fit."""
    batch = None if loaded is None else loaded.batch
    leaves = None if spec is None else spec.take(batch)
    if spec is None or leaves is None:
        spec = BatchSpec.of(batch)
        leaves = spec.take(batch) or []
    is_tensor = [tensor_spec.dtype is not None for tensor_spec in spec.tensor_specs]
    tensors = [*compress(leaves, is_tensor)]
    objects = [leaf for leaf, has_bytes in zip(leaves, is_tensor, strict=True) if not has_bytes]
    content = _to_bytes(objects) if loaded is not None and objects else b""
    facts = (0, -1, -1) if loaded is None else (1, _known(loaded.real), _known(loaded.real_in_step))
    shapes = [size for tensor in tensors for size in tensor.shape]
    nbytes = _header_bytes(len(shapes)) + sum([_aligned(tensor.nbytes) for tensor in tensors])
    return TensorPayload(spec, tensors, content, facts, shapes, nbytes + _aligned(len(content)))


class ReceiverBuffer:
    """Rank 0's buffer for the messages to one receiver, all of the same size."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._written: tuple[BatchSpec, list[int]] | None = None
        self._header = buffer[:0]
        self._views: list[Tensor] = []

    def write(
        self, payload: TensorPayload, following: NextMessage, following_bytes: int, *, is_last: bool
    ) -> None:
        """Write a message, the kind of the next one, and whether the receiver gets no further batch."""
        if self._written != (payload.spec, payload.shapes):
            self._lay_out(payload)
        header = [following, following_bytes, is_last, *payload.facts, len(payload.objects), *payload.shapes]
        with torch.no_grad():
            self._header.copy_(torch.tensor(header, device="cpu"))
            if payload.tensors:
                torch._foreach_copy_(self._views, payload.tensors)
        if payload.objects:
            size = len(payload.objects)
            start = payload.nbytes - _aligned(size)
            self.buffer[start : start + size].copy_(
                torch.frombuffer(bytearray(payload.objects), dtype=torch.uint8)
            )

    def _lay_out(self, payload: TensorPayload) -> None:
        """Create views of the buffer for the header and the tensors of a payload."""
        self._header = self.buffer[: 8 * (_FIXED + len(payload.shapes))].view(torch.int64)
        start = _header_bytes(len(payload.shapes))
        self._views = []
        for tensor in payload.tensors:
            content = self.buffer[start : start + tensor.nbytes]
            self._views.append(content.view(tensor.dtype).view(tensor.shape))
            start += _aligned(tensor.nbytes)
        self._written = (payload.spec, payload.shapes)


@dataclass(slots=True)
class Message:
    """A received message, and its announcement of the next one."""

    loaded: BatchWithMeta | None
    is_last: bool
    following: NextMessage
    following_bytes: int


def read(buffer: Tensor, spec: BatchSpec) -> Message:
    """Read a message; its tensors share the buffer's memory."""
    # 1. The header.
    count = _FIXED + spec.dims
    header: list[int] = buffer[: 8 * count].view(torch.int64).tolist()
    following, following_bytes, is_last, has_batch, real, real_in_step, objects_bytes = header[:_FIXED]
    # 2. The tensors, and the objects among them.
    start, offset = _header_bytes(spec.dims), _FIXED
    leaves: list[Any] = []
    with not_views():  # else views share a version counter, and an in-place change counts for all
        for tensor_spec in spec.tensor_specs:
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
            for tensor_spec, leaf in zip(spec.tensor_specs, leaves, strict=True)
        ]
    # 3. The batch.
    loaded = None
    if has_batch:
        batch = spec.build(iter(leaves))
        loaded = BatchWithMeta(batch, None if real < 0 else real, None if real_in_step < 0 else real_in_step)
    return Message(loaded, bool(is_last), NextMessage(following), following_bytes)


ALIGNMENT = 16
_FIXED = 7  # int64 numbers in a header before the shapes


def _known(count: int | None) -> int:
    return -1 if count is None else count


def _header_bytes(dims: int) -> int:
    return _aligned(8 * (_FIXED + dims))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _to_bytes(objects: list[Any]) -> bytes:
    if not any(isinstance(item, Tensor) for item in objects):
        return b"p" + pickle.dumps(objects)
    # Plain pickle would leave every sparse tensor in a torch list, which its next `load` validates.
    file = io.BytesIO(b"t")
    file.seek(1)
    torch.save(objects, file)
    return file.getvalue()


def _from_bytes(content: bytes) -> list[Any]:
    """Unpickle the result of `_to_bytes`, from rank 0 of this run."""
    if content[:1] == b"p":
        return pickle.loads(content[1:])  # noqa: S301 - rank 0 of this run has written them
    return torch.load(io.BytesIO(content[1:]), weights_only=False)


Take: TypeAlias = Callable[[Any, list[Any]], bool]
Build: TypeAlias = Callable[[Iterator[Any]], Any]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A leaf of a batch: dtype and number of dims of a tensor; no dtype for other objects."""

    dtype: torch.dtype | None = None
    dims: int = 0


class BatchSpec:
    """The structure, dtypes and numbers of dims of batches.

    Example:
        >>> spec = BatchSpec.of({"ids": torch.zeros(2, 3), "name": "a"})
        >>> leaves = spec.take({"ids": torch.ones(1, 1), "name": "b"})
        >>> spec.build(iter(leaves))
        {'ids': tensor([[1.]]), 'name': 'b'}
        >>> spec.take({"ids": torch.ones(1), "name": "b"}) is None
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
        """Return the spec of a batch."""

        def describe(leaf: Any) -> TensorSpec:
            return TensorSpec(leaf.dtype, leaf.dim()) if is_plain(leaf) else TensorSpec()

        return cls(recursively_apply(describe, batch, test_type=lambda data: not is_dataclass_instance(data)))

    def take(self, batch: Any) -> list[Any] | None:
        """Return the leaves of a batch in order, or `None` if it does not fit."""
        leaves: list[Any] = []
        return leaves if self._take(batch, leaves) else None

    def build(self, leaves: Iterator[Any]) -> Any:
        """Build a batch from leaves."""
        return self._build(leaves)


def is_plain(leaf: Any) -> bool:
    """Return whether a leaf is sent as raw bytes: a tensor, not sparse, nested or of a subclass."""
    return type(leaf) is Tensor and leaf.layout is torch.strided and not leaf.is_nested


def _compile(layout: Any, tensor_specs: list[TensorSpec]) -> tuple[Take, Build]:
    """Create the functions that flatten and rebuild batches of a layout; append its leaves to a list."""
    if type(layout) is TensorSpec:
        tensor_specs.append(layout)
        return _leaf_taker(layout), next
    inside = children(layout)
    if inside is None:
        raise TypeError(f"{layout!r} is neither a TensorSpec nor a container")
    keys = [key for key, _ in inside]
    parts = [_compile(value, tensor_specs) for _, value in inside]
    builds = [build for _, build in parts]
    values, build = _access(layout, keys, builds)

    def take(data: Any, leaves: list[Any]) -> bool:
        inside = values(data)
        if inside is None:
            return False
        return all(take_part(value, leaves) for (take_part, _), value in zip(parts, inside, strict=True))

    return take, build


def _access(layout: Any, keys: list[Any], builds: list[Build]) -> tuple[Callable[[Any], Any], Build]:
    """Create a function that returns a container's values (`None` if it does not fit), and its builder."""
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
