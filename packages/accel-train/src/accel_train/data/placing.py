"""Getting batches onto the device: not at all, plainly, or ahead of time on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from accel_ops.move import send_to_device

Place = Callable[[Any], Any]


def to_cpu(batch: Any) -> Any:
    """Move a batch to the CPU, at next to no cost where it is there already.

    Args:
        batch: Nested tensors.
    """
    kind = type(batch)
    leaves: Iterable[Any]
    if kind is torch.Tensor:
        leaves = (batch,)
    elif kind is list or kind is tuple:
        leaves = batch
    elif kind is dict:
        leaves = batch.values()
    else:
        return send_to_device(batch, _CPU)
    for leaf in leaves:
        if type(leaf) is not torch.Tensor or not leaf.is_cpu:
            return send_to_device(batch, _CPU)
    return batch


_CPU = torch.device("cpu")


def placing(device: torch.device | None, *, non_blocking: bool) -> Place | None:
    """Choose how batches get to a device.

    Args:
        device: Where they shall be, or None to leave them where they are.
        non_blocking: Whether to return before the copy is complete.

    Returns:
        What to call with every batch, or None for nothing.
    """
    if device is None:
        return None
    if device.type == "cpu":
        return to_cpu
    return lambda batch: send_to_device(batch, device, non_blocking=non_blocking)
