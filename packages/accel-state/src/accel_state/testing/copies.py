"""A copy that was issued and has not run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from accel_state.testing.clocks import Race
from accel_state.testing.storages import byte_range

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class Copy:
    """A copy between pinned and device memory.

    Args:
        target: Where to, as a view that keeps no memory of the device from being freed.
        source: Where from, likewise.
        where: Place in the code.
        expected: What the source held when the copy was issued, if nothing may change it.
    """

    target: Tensor
    source: Tensor
    where: str
    expected: Tensor | None = None

    def overlaps(self, other: Copy) -> bool:
        """Whether a copy that runs earlier may change what this one's operands hold."""
        mine = [_addresses(self.target), _addresses(self.source)]
        return any(
            a[0] < b[1] and b[0] < a[1]
            for a in mine
            for b in (_addresses(other.target), _addresses(other.source))
        )

    def poison_target(self) -> None:
        """Make the target's old values unreadable; they are gone anyway."""
        if self.target.dtype is not torch.bool:
            floating = self.target.is_floating_point() or self.target.is_complex()
            with torch.no_grad():
                self.target.fill_(math.nan if floating else _LOWEST.get(self.target.dtype, -1))

    def run(self) -> list[Race]:
        """Copy the bytes; return what was done to the source meanwhile."""
        found: list[Race] = []
        if self.expected is not None and not _same_bytes(self.expected, self.source):
            found = [
                Race(
                    f"a copy\n    at {self.where}",
                    "a change of the memory that a copy reads, by the host or by a stream",
                )
            ]
        with torch.no_grad():
            self.target.copy_(self.source)
        return found


_LOWEST = {torch.uint8: 255, torch.uint16: 65535, torch.uint32: 2**32 - 1}


def _addresses(tensor: Tensor) -> tuple[int, int]:
    start, end = byte_range(tensor)
    base = tensor.untyped_storage().data_ptr()
    return base + start, base + end


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)
