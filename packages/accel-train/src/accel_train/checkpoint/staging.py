"""Copies of what is being saved in host memory, so that training goes on while they are written."""

from __future__ import annotations

import ctypes
import logging
import weakref
from bisect import bisect_right, insort
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_ops.weights.stream import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from accel_ops.weights.stream import ByteSink

logger = logging.getLogger(__name__)

_BLOCK = 64 << 20  # bytes of host memory taken at once; more for a larger tensor
_SMALL = 64 << 10  # bytes up to which a piece is collected with its neighbours
_ALIGNMENT = 64


class HostArena:
    """Host memory that is filled anew by every save. Taken when first needed, kept for the next time.

    Args:
        device: Where copies come from; if it is a GPU, the memory is pinned.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._blocks: list[Tensor] = []
        self._free: list[int] = []  # bytes at the end of each block
        self._spans: list[tuple[int, int]] = []  # address and size of each block, sorted

    @property
    def nbytes(self) -> int:
        """How much memory is kept."""
        return sum(size for _, size in self._spans)

    def reset(self) -> None:
        """Let the next save use the same memory."""
        self._free = [block.numel() for block in self._blocks]

    def take(self, nbytes: int) -> Tensor:
        """Give memory.

        Args:
            nbytes: How much.

        Returns:
            uint8, of shape `(nbytes,)`, aligned for every element type.
        """
        room = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        index = next((index for index, free in enumerate(self._free) if free >= room), None)
        if index is None:
            index = len(self._blocks)
            block = self._allocate(max(room, _BLOCK))
            self._blocks.append(block)
            self._free.append(block.numel())
            insort(self._spans, (block.data_ptr(), block.numel()))
        begin = self._blocks[index].numel() - self._free[index]
        self._free[index] -= room
        return self._blocks[index][begin : begin + nbytes]

    def holds(self, address: int) -> bool:
        """Whether an address is inside of this memory."""
        index = bisect_right(self._spans, (address, 1 << 63)) - 1
        return index >= 0 and address < sum(self._spans[index])

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Copy a tensor from a device. The copy is under way: synchronise before reading it.

        Args:
            tensor: On any device; on the CPU it stays where it is.
        """
        source = tensor.detach()
        if source.device.type == "cpu":
            return source
        memory = self.take(source.numel() * source.element_size())
        copy = memory.view(source.dtype).view(source.shape)
        return copy.copy_(source, non_blocking=True)

    def _allocate(self, nbytes: int) -> Tensor:
        block = torch.empty(nbytes, dtype=torch.uint8)
        if self._pinned:
            # torch's own pinned memory comes in powers of two, which would waste up to half of it.
            runtime: Any = torch.cuda.cudart()
            failed = int(runtime.cudaHostRegister(block.data_ptr(), nbytes, 0))
            if failed:
                logger.warning("Host memory could not be pinned (CUDA error %d): copies are slower.", failed)
            else:
                weakref.finalize(self, runtime.cudaHostUnregister, block.data_ptr())
        return block


class Recorder:
    """Takes the bytes of one file, and gives them again later.

    Args:
        arena: Where large pieces are copied to. Pieces that are there already are not copied.
    """

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self._pieces: list[bytearray | memoryview] = []

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if len(view) < _SMALL:
            if not self._pieces or not isinstance(self._pieces[-1], bytearray):
                self._pieces.append(bytearray())
            self._pieces[-1] += view  # pyright: ignore[reportOperatorIssue] - the one just made
        else:
            self._pieces.append(self._kept(view))
        return len(view)

    def flush(self) -> None:
        """Do nothing; `torch.save` asks for it."""

    def replay(self, sink: ByteSink) -> None:
        """Write everything to a sink."""
        for piece in self._pieces:
            sink.write(piece)

    def _kept(self, view: memoryview) -> memoryview:
        size = len(view)
        address: int = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        # By its address, for torch warns about read-only buffers even if they are only read.
        there: Any = (ctypes.c_char * size).from_address(address)
        source = torch.frombuffer(there, dtype=torch.uint8)
        if not self._arena.holds(address):
            source = self._arena.take(size).copy_(source)  # with as many threads as torch may use
        return as_bytes(source)
