"""What is known of each storage: its kind, its block and who accessed it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from accel_state.testing.clocks import History

if TYPE_CHECKING:
    from torch import Tensor

    from accel_state.testing.memory import Block

_SWEEP = 512
_FRAMES = 3
_OWN = (
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "streams.py"),
    str(Path(torch.__file__).parent),
    "<frozen",
)


class Kind(Enum):
    """Where a storage lies. On the CPU only its use can tell."""

    UNKNOWN = 0
    DEVICE = 1
    PINNED = 2


@dataclass(slots=True)
class Tracked:
    """A storage.

    Args:
        reference: Holds the storage's address, so that it is not given to another one.
        kind: Where it lies.
        block: Its memory, if it is the device's own.
    """

    reference: StorageWeakRef
    kind: Kind = Kind.UNKNOWN
    block: Block | None = None
    history: History = field(default_factory=History)


class Storages:
    """All storages that were seen, by identity."""

    def __init__(self) -> None:
        self._table: dict[int, Tracked] = {}
        self._limit = _SWEEP

    def find(self, tensor: Tensor) -> Tracked:
        """Return what is known of a tensor's storage; begin to track it if it is new."""
        key = storage_id(tensor)
        found = self._table.get(key)
        if found is None:
            if len(self._table) > self._limit:
                self._table = {
                    key: tracked for key, tracked in self._table.items() if not tracked.reference.expired()
                }
                self._limit = 2 * len(self._table) + _SWEEP
            found = self._table[key] = Tracked(StorageWeakRef(tensor.untyped_storage()))
        return found

    def kind(self, tensor: Tensor) -> Kind:
        """Return where a tensor lies."""
        return self.find(tensor).kind


def storage_id(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage as long as a reference to it, weak or not, is held."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a strided tensor in its storage and the first after it.

    Example:
        >>> byte_range(torch.zeros(4, 4)[1:3, :2])
        (16, 40)
    """
    start = int(tensor.storage_offset()) * tensor.itemsize
    if not tensor.numel():
        return start, start
    last = sum(int((size - 1) * stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


def user_line() -> str:
    """Return the innermost lines of the caller's code that are neither torch's nor this package's."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    lines: list[str] = []
    while frame is not None and len(lines) < _FRAMES:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN):
            lines.append(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return "\n    called at ".join(lines) or "an unknown place"
