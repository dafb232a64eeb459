"""All-to-all with gradients, of heads (sequence parallelism) and of tokens (expert parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accel_state import hang_monitor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_to_all(
    rows: Tensor,
    group: ProcessGroup,
    what: str,
    *,
    receive: list[int] | None = None,
    send: list[int] | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Exchange rows between ranks; the backward pass returns gradients. A collective over the group.

    Args:
        rows: Of any shape; dim 0 has the rows for rank 0, then those for rank 1, and so on.
        group: The ranks.
        what: Name of the exchanged tensor, for messages about a collective that hangs.
        receive: Number of rows to receive from each rank; as many from each if `None`.
        send: Number of rows to send to each rank, likewise.
        factor: Factor of the gradients.
    """
    return cast("Tensor", _AllToAll.apply(rows, (receive, send, group, what), factor))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: tuple[Any, ...], factor: float) -> Tensor:
        ctx.exchange, ctx.factor = exchange, factor
        receive, send, group, what = exchange
        rows = rows.contiguous()
        count = len(rows) if receive is None else sum(receive)
        received = rows.new_empty(count, *rows.shape[1:])
        with hang_monitor.collective_scope(f"all_to_all of {what}"):
            dist.all_to_all_single(received, rows, receive, send, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        receive, send, group, what = ctx.exchange
        if ctx.factor != 1:
            gradient = gradient * ctx.factor
        return _AllToAll.apply(gradient, (send, receive, group, what), 1.0), None, None  # pyright: ignore[reportReturnType] - a tensor
