"""Reductions over all ranks: their operands, scaling and results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from accel_state.backends.base import ReduceOp

COMBINED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)
"""Types that `combine_rows` takes."""

# Types whose exponents reach so far that scaling by a power of two before adding loses nothing.
_WIDE_EXPONENTS = {torch.float32, torch.float64, torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The reduction of values, and the scaling of the result.

    Attributes:
        divisor: The divisor of a mean, which may be 1; None for no mean.
    """

    op: ReduceOp = "sum"
    divisor: int | None = None
    scale: float = 1.0

    @property
    def changes(self) -> bool:
        """Whether it scales."""
        return self.divisor is not None or self.scale != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingReduce:
    """One reduction over all ranks.

    Attributes:
        total: The operand of this rank; overwritten by the result over all ranks.
        final: The result: `total` itself, or another tensor of its size.
        scaling: Reduction and scaling.
    """

    total: Tensor
    final: Tensor
    scaling: Scaling

    def finish(self) -> None:
        """Scale the result and store it in `final`."""
        total, divisor, scale = self.total, self.scaling.divisor, self.scaling.scale
        if total.dtype == torch.int64 and self.final is not total:
            torch.div(total, divisor or 1, out=self.final)
            total = self.final
        elif divisor is not None:
            total.div_(divisor)
        if scale != 1.0:
            total.mul_(scale)
        if self.final is not total:
            self.final.copy_(total)


def reduce_in_place(operand: Tensor, scaling: Scaling) -> PendingReduce:
    """Prepare the reduction of a tensor that may be overwritten.

    A mean or a scaled result of integers or booleans is exact in 64 bits and then becomes the default
    floating type; float8, which has no arithmetic, takes the way through float32.
    """
    if operand.dtype.is_complex and scaling.op != "sum":
        raise TypeError(
            f"reduce(reduction={scaling.op!r}) of a {operand.dtype} tensor: complex numbers are only added. "
            'Use "sum" or "mean", or reduce torch.view_as_real(tensor).'
        )
    total = final = operand
    if scaling.changes:
        if not (operand.dtype.is_floating_point or operand.dtype.is_complex):
            total = operand.to(torch.int64, copy=True)
            final = torch.empty(operand.shape, dtype=torch.get_default_dtype(), device=operand.device)
        elif operand.dtype.itemsize == 1:
            total = operand.to(torch.float32)
    return PendingReduce(total=total, final=final, scaling=scaling)


def combine_rows(rows: Tensor, scaling: Scaling) -> PendingReduce:
    """Reduce the gathered operands of all ranks."""
    wide = scaling.changes and not rows.dtype.is_floating_point and not rows.dtype.is_complex
    if wide:
        rows = rows.to(torch.int64)
    if scaling.op == "sum":
        total = rows.sum(0, dtype=rows.dtype)
    else:
        total = {"max": rows.amax, "min": rows.amin, "prod": rows.prod}[scaling.op](0).to(rows.dtype)
    final = torch.empty(total.shape, dtype=torch.get_default_dtype()) if wide else total
    return PendingReduce(total=total, final=final, scaling=scaling)


def reduce_copy(operand: Tensor, scaling: Scaling, device: torch.device) -> PendingReduce:
    """Prepare the reduction of a tensor that stays as it is; read it once, and write the result once."""
    source = operand.detach().to(device)
    total = torch.empty(source.shape, dtype=source.dtype, device=device)
    factor = scaling.scale / (scaling.divisor or 1)
    linear = scaling.op != "prod" and source.dtype in _WIDE_EXPONENTS
    if linear and math.frexp(factor)[0] == 0.5:
        torch.mul(source, factor, out=total)  # a power of two: exact, so it can come first, with the copy
        return PendingReduce(total=total, final=total, scaling=Scaling(op=scaling.op))
    return reduce_in_place(total.copy_(source), scaling)
