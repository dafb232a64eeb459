"""Sums and means over all ranks: what is sent, and where the result comes to lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

# Types whose exponents reach so far that scaling by a power of two before adding loses nothing.
_WIDE_EXPONENTS = {torch.float32, torch.float64, torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What happens to a sum.

    Attributes:
        members: By how many it is divided for a mean, which may be 1; None for a sum.
        scale: The factor after that.
    """

    members: int | None
    scale: float

    @property
    def changes(self) -> bool:
        """Whether anything happens at all."""
        return self.members is not None or self.scale != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """One sum over all ranks.

    Attributes:
        total: The addend of this rank; overwritten by the sum.
        final: Where the result comes to lie: `total` itself, or another tensor of its size.
        scaling: What happens to the sum.
    """

    total: Tensor
    final: Tensor
    scaling: Scaling

    def finish(self) -> None:
        """Scale the sum and put it where it belongs."""
        total, members, scale = self.total, self.scaling.members, self.scaling.scale
        if total.dtype == torch.int64 and self.final is not total:
            torch.div(total, members or 1, out=self.final)
            total = self.final
        elif members is not None:
            total.div_(members)
        if scale != 1.0:
            total.mul_(scale)
        if self.final is not total:
            self.final.copy_(total)


def add_in_place(addend: Tensor, scaling: Scaling) -> Addition:
    """The sum of a tensor that may be overwritten.

    A mean or a scaled sum of integers or booleans is exact in 64 bits and then becomes the default floating
    type; float8, which has no arithmetic, takes the way through float32.

    Args:
        addend: This rank's tensor, contiguous.
        scaling: What happens to the sum.
    """
    total = final = addend
    if scaling.changes:
        if not (addend.dtype.is_floating_point or addend.dtype.is_complex):
            total = addend.to(torch.int64, copy=True)
            final = torch.empty(addend.shape, dtype=torch.get_default_dtype(), device=addend.device)
        elif addend.dtype.itemsize == 1:
            total = addend.to(torch.float32)
    return Addition(total=total, final=final, scaling=scaling)


def add_copy(addend: Tensor, scaling: Scaling, device: torch.device) -> Addition:
    """The sum of a tensor that stays as it is; its memory is read once, and the result's written once.

    Args:
        addend: This rank's tensor.
        scaling: What happens to the sum.
        device: Where to add.
    """
    source = addend.detach().to(device)
    total = torch.empty(source.shape, dtype=source.dtype, device=device)
    factor = scaling.scale / (scaling.members or 1)
    if source.dtype in _WIDE_EXPONENTS and math.frexp(factor)[0] == 0.5:
        torch.mul(source, factor, out=total)  # a power of two: exact, so it can come first, with the copy
        return Addition(total=total, final=total, scaling=Scaling(members=None, scale=1.0))
    return add_in_place(total.copy_(source), scaling)
