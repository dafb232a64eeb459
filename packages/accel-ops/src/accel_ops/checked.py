"""Debug mode: before a collective on nested data, all ranks compare their calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from accel_ops.tree import walk
from accel_state.calls import Description, compare_calls

if TYPE_CHECKING:
    from accel_state.backends.base import Collectives


def check(
    collectives: Collectives, operation: str, *data: Any, detail: str = "", rows_differ: bool = False
) -> None:
    """Check that all ranks are about to call the same collective; called by every rank before each.

    Raises:
        DistributedOperationException: They are not. Every rank raises it, with a table of where each rank
            is, what it calls, and on what.
    """
    leaves = (_describe(path, leaf) for part in data for path, leaf in walk(part))
    compare_calls(collectives, operation, leaves, detail=detail, rows_differ=rows_differ)


def _describe(path: str, leaf: Any) -> Description:
    if isinstance(leaf, torch.Tensor):
        return path, str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    return path, type(leaf).__name__, None
