"""Memory of the late device: poisoned when it is freed, and handed out again at once."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from accel_state.testing.clocks import History

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from accel_state.testing.clocks import Actor
    from accel_state.testing.queues import LateStream

POISON = 0xFF
"""The byte that freed and new memory is filled with: NaN in every floating-point format, -1 in integers."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory that is handed out to one storage after the other.

    Args:
        memory: uint8, of the block's capacity.
        owner: The stream to whose pool it belongs; the host for pinned memory.
        history: The accesses of its present tenant.
        recorded: The streams of `record_stream`.
        until: What must hold before it is handed out again.
        where: Where in the code its present tenant was allocated.
    """

    memory: np.ndarray
    owner: Actor
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

    def take(self, nbytes: int, owner: Actor) -> tuple[Block, Tensor]:
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
