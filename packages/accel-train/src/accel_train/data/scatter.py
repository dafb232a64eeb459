"""Scatter batches from the main process: one collective per round once the structure is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_state.errors import AccelError
from accel_train.data.batch_spec import BatchSpec, TensorSpec
from accel_train.data.message import Next, Slot, TensorPayload, flatten_batch, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from accel_state.backends.base import Collectives
    from accel_train.data.iterable_shard import BatchWithMeta


_EMPTY = BatchSpec(TensorSpec())


class MainProcessReadError(AccelError, RuntimeError):
    """The main process could not read a batch for all; it raises the error itself."""


@dataclass(frozen=True, slots=True)
class Header:
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
        self._slots: list[Slot] = []

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
            notice = Header([None, *layouts], upcoming.nbytes)
        elif upcoming is not None:
            notice = Header(error=f"{type(upcoming).__name__}: {upcoming}")
        self._collectives.broadcast_object_list([notice], 0)

    def _start(
        self, current: Round | Exception | None
    ) -> tuple[Round | Exception | None, Callable[[], None]]:
        """Begin to send a round; return what follows it, and what waits until it was sent."""
        if not isinstance(current, Round):
            return None, _nothing
        upcoming = self._take()
        following = Next.END if upcoming is None else Next.SAME
        if _needs_notice(current, upcoming):
            following = Next.NOTICE
        nbytes = upcoming.nbytes if isinstance(upcoming, Round) and following is Next.SAME else 0
        if not self._slots or self._slots[0].buffer.numel() != current.nbytes:
            buffers = torch.empty(self._collectives.world_size, current.nbytes, dtype=torch.uint8)
            self._slots = [Slot(buffer) for buffer in buffers.unbind()]
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
            if letter.following is Next.NOTICE:
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
        heard: list[Header | None] = [None]
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
