"""Memory of the late device, poisoned when freed and handed out again at once; and what is known of it."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from accel_state.testing.clocks import History

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from accel_state.testing.late import LateDevice
    from accel_state.testing.queues import LateStream

_SWEEP = 512
_FRAMES = 3
_OWN = (
    str(Path(__file__).parent),
    str(Path(__file__).parents[1] / "streams.py"),
    str(Path(torch.__file__).parent),
    "<frozen",
)


POISON = 0xFF
"""The byte that freed and new memory is filled with: NaN in every floating-point format, -1 in integers."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory that is handed out to one storage after the other.

    Args:
        memory: uint8, of the block's capacity.
        owner: The stream to whose pool it belongs; None for pinned memory.
        history: The accesses of its present tenant.
        recorded: The streams of `record_stream`.
        until: What must hold before it is handed out again.
        where: Where in the code its present tenant was allocated.
    """

    memory: np.ndarray
    owner: LateStream | None
    history: History = field(default_factory=History)
    recorded: list[LateStream] = field(default_factory=list["LateStream"])
    until: list[Callable[[], bool]] = field(default_factory=list["Callable[[], bool]"])
    where: str = ""

    def poison(self) -> None:
        """Overwrite all of it."""
        self.memory.fill(POISON)

    def tensor(self) -> Tensor:
        """Return all of the memory, without keeping its present tenant alive."""
        return torch.from_numpy(self.memory)


class Pool:
    """Blocks by owner. The one that was freed last is handed out first."""

    def __init__(self) -> None:
        self._freed: deque[Block] = deque()
        self._waiting: list[Block] = []
        self._free: list[Block] = []

    def take(self, nbytes: int, owner: LateStream | None) -> tuple[Block, Tensor]:
        """Hand out memory.

        Returns:
            The block, and a uint8 tensor of shape `(nbytes,)` on whose end the block is freed.
        """
        self._waiting, still = [], self._waiting
        for block in still:
            ready = all(condition() for condition in block.until)
            (self._free if ready else self._waiting).append(block)
        fitting = [block for block in self._free if block.owner is owner and block.memory.size >= nbytes]
        if fitting:
            block = fitting[-1]
            self._free.remove(block)
        else:
            block = Block(np.empty(max(nbytes, 1), dtype=np.uint8), owner)
        block.until = []
        block.recorded = []
        block.history = History()
        lease = block.memory[:]
        weakref.finalize(lease, self._freed.append, block).atexit = False
        return block, torch.from_numpy(lease)[:nbytes]

    def freed(self) -> list[Block]:
        """Return the blocks whose last tensor has gone since the last call."""
        blocks: list[Block] = []
        while self._freed:
            blocks.append(self._freed.popleft())
        return blocks

    def free_block(self, block: Block) -> None:
        """Make a freed block available, at once or when its conditions hold."""
        (self._waiting if block.until else self._free).append(block)


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
        nbytes: Its size.
        kind: Where it lies.
        device: The device on which it lies, if it does.
        block: Its memory, if it is the device's own.
    """

    reference: StorageWeakRef
    nbytes: int
    kind: Kind = Kind.UNKNOWN
    device: LateDevice | None = None
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
            found = self._table[key] = Tracked(
                StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()
            )
        return found

    def kind(self, tensor: Tensor) -> Kind:
        """Return where a tensor lies."""
        return self.find(tensor).kind

    def nbytes(self, kind: Kind, device: LateDevice | None = None) -> int:
        """Return the bytes of the living storages of a kind, on a device."""
        return sum(
            tracked.nbytes
            for tracked in self._table.values()
            if tracked.kind is kind and tracked.device is device and not tracked.reference.expired()
        )


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
