"""Blocks that execute on an accelerator: they come through pinned buffers, on a stream of their own.

Two slots on the device: the present block computes from one while the next is copied into the other. A slot
is filled again only after an event says that its last use is over; nothing waits on the host. See
docs/guides/big_models.md for the reasons.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import psutil
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from concurrent.futures import Future

    from torch import Tensor

_ALIGNMENT = 512
"""Bytes; what CUDA's own allocations are aligned to."""

_PINNED_SHARE = 0.5
"""The part of the free main memory that blocks may keep pinned."""


class Device(Protocol):
    """What streams need of a device: `torch.cuda` and its like have it; tests have a recording one."""

    def Stream(self, device: torch.device) -> Any: ...  # noqa: N802, D102 - torch's name
    def Event(self) -> Any: ...  # noqa: N802, D102 - torch's name
    def current_stream(self, device: torch.device) -> Any: ...  # noqa: D102 - torch's name
    def stream(self, stream: Any) -> Any: ...  # noqa: D102 - torch's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Where a tensor lies in its block's flat buffer."""

    begin: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, flat: Tensor) -> Tensor:
        """See the tensor in a flat buffer of bytes."""
        end = self.begin + math.prod(self.shape) * self.dtype.itemsize
        return flat[self.begin : end].view(self.dtype).view(self.shape)


@dataclass(slots=True)
class _Slot:
    buffer: Tensor
    ready: Any
    free: Any
    block: str | None = None
    coming: Future[None] | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    pieces: dict[str, Piece]
    size: int
    host: list[Tensor] = field(default_factory=list)


class PinnedCarrier:
    """Brings blocks to an accelerator, the next while the present one computes.

    Blocks on the CPU are packed once into one pinned buffer each, as long as half of the free memory lasts;
    others, and those on the disk, pass through two pinned staging buffers that a thread fills.

    Args:
        weights: All offloaded weights by name.
        blocks: Block name to the names of its tensors.
        device: Where blocks execute.
        resident: The names of tensors that are in main memory anyway, and are worth pinning.
        module: The device's streams and events; by default torch's.
        pin: Whether host buffers are pinned; only tests without a driver say no.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        blocks: Mapping[str, Iterable[str]],
        device: torch.device,
        *,
        resident: Iterable[str] = (),
        module: Device | None = None,
        pin: bool = True,
    ) -> None:
        self._weights = weights
        self._device = device
        own: Any = torch.get_device_module(device) if module is None else module
        self._module: Device = own
        self._pin = pin
        self._side = self._module.Stream(device)
        self._blocks = {block: _layout(weights, names) for block, names in blocks.items()}
        self._staging: list[tuple[Tensor, Any]] = []
        self._turn = 0
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="accel-prefetch")
        self._pin_blocks(frozenset(resident))
        largest = max((block.size for block in self._blocks.values()), default=0)
        self._slots = [self._slot(largest) for _ in range(min(2, len(self._blocks)))]
        self._present: _Slot | None = None

    def begin(self, block: str) -> None:
        """Let the computation wait, on the device, until the block is there."""
        slot = self._find(block) or self._start(block)
        if slot.coming is not None:
            slot.coming.result()
            slot.coming = None
        self._module.current_stream(self._device).wait_event(slot.ready)
        self._present = slot

    def ahead(self, block: str) -> None:
        """Start to copy a block into the other slot."""
        if self._find(block) is None and len(self._slots) > 1:
            self._start(block)

    def end(self, block: str) -> None:
        """Note on the device that the block's slot is free once all that was issued is done."""
        slot = self._find(block)
        if slot is not None:
            slot.free.record(self._module.current_stream(self._device))

    def tensor(self, name: str) -> Tensor:
        """Give a view of the present slot."""
        slot = self._present
        if slot is None or slot.block is None:
            raise KeyError(name)
        return self._blocks[slot.block].pieces[name].view(slot.buffer)

    def _find(self, block: str) -> _Slot | None:
        return next((slot for slot in self._slots if slot.block == block), None)

    def _start(self, block: str) -> _Slot:
        slot = next((slot for slot in self._slots if slot is not self._present), self._slots[0])
        if slot.coming is not None:
            slot.coming.result()
            slot.coming = None
        slot.block = block
        held = self._blocks[block]
        if held.host:
            self._copy(slot, held.host[0])
        else:
            slot.coming = self._worker.submit(self._stage, slot, held)
        return slot

    def _copy(self, slot: _Slot, host: Tensor) -> None:
        self._side.wait_event(slot.free)
        with self._module.stream(self._side):
            slot.buffer[: host.numel()].copy_(host, non_blocking=True)
        slot.ready.record(self._side)

    def _stage(self, slot: _Slot, held: _Block) -> None:
        """Run in the worker: read into a staging buffer that no copy is reading any more, then copy."""
        buffer, done = self._staging_buffer()
        done.synchronize()
        for name, piece in held.pieces.items():
            piece.view(buffer).copy_(self._weights[name])
        self._copy(slot, buffer[: held.size])
        done.record(self._side)

    def _staging_buffer(self) -> tuple[Tensor, Any]:
        largest = max(block.size for block in self._blocks.values() if not block.host)
        while len(self._staging) < 2:
            self._staging.append((self._host_buffer(largest), self._module.Event()))
        self._turn = 1 - self._turn
        return self._staging[self._turn]

    def _pin_blocks(self, resident: frozenset[str]) -> None:
        room = psutil.virtual_memory().available * _PINNED_SHARE
        for block in self._blocks.values():
            if not resident.issuperset(block.pieces) or block.size > room:
                continue
            room -= block.size
            buffer = self._host_buffer(block.size)
            for name, piece in block.pieces.items():
                piece.view(buffer).copy_(self._weights[name])
            block.host.append(buffer)

    def pinned_views(self) -> dict[str, Tensor]:
        """Give the tensors as they lie in pinned memory, so that their first copies can be dropped."""
        return {
            name: piece.view(block.host[0])
            for block in self._blocks.values()
            if block.host
            for name, piece in block.pieces.items()
        }

    def _slot(self, size: int) -> _Slot:
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        return _Slot(buffer, self._module.Event(), self._module.Event())

    def _host_buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)


def _layout(weights: Mapping[str, Tensor], names: Iterable[str]) -> _Block:
    pieces: dict[str, Piece] = {}
    end = 0
    for name in names:
        tensor = weights[name]
        pieces[name] = Piece(begin=end, shape=tuple(tensor.shape), dtype=tensor.dtype)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return _Block(pieces, end)
