"""Copies of what is being saved in host memory, so that training goes on while they are written."""

from __future__ import annotations

import ctypes
import logging
import weakref
from bisect import bisect_right
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
        self._used: list[int] = []

    @property
    def nbytes(self) -> int:
        """How much memory is kept."""
        return sum(len(block) for block in self._blocks)

    def reset(self) -> None:
        """Let the next save use the same memory."""
        self._used = [0] * len(self._blocks)

    def take(self, nbytes: int) -> Tensor:
        """Give memory.

        Args:
            nbytes: How much.

        Returns:
            uint8, of shape `(nbytes,)`, aligned for every element type.
        """
        for index, block in enumerate(self._blocks):
            begin = self._used[index]
            if begin + nbytes <= len(block):
                self._used[index] = begin + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
                return block[begin : begin + nbytes]
        self._blocks.append(self._allocate(max(nbytes, _BLOCK)))
        self._used.append(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        return self._blocks[-1][:nbytes]

    def holds(self, address: int) -> bool:
        """Whether an address is inside of this memory."""
        starts = sorted((block.data_ptr(), len(block)) for block in self._blocks)
        index = bisect_right(starts, (address, 1 << 63)) - 1
        return index >= 0 and address < starts[index][0] + starts[index][1]

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
        if self._arena.holds(address):
            # By its address, for torch warns about read-only buffers even if they are only read.
            there: Any = (ctypes.c_char * size).from_address(address)
            return as_bytes(torch.frombuffer(there, dtype=torch.uint8))
        memory = self._arena.take(size)
        ctypes.memmove(memory.data_ptr(), address, size)  # about twice as fast as torch's own copy
        return as_bytes(memory)
