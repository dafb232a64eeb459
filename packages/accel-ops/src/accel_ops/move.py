"""Move nested data between devices, and broadcast a tensor of unknown shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import torch

from accel_ops.tree import children, is_dataclass_instance, rebuild
from accel_state.errors import DistributedOperationException
from accel_state.runtime import current_or_single

T = TypeVar("T")


def send_to_device(
    tensor: T,
    device: str | int | torch.device,
    non_blocking: bool = False,
    skip_keys: str | Collection[str] | None = None,
) -> T:
    """Move everything in nested data that has a `to` method to a device; the rest stays as it is.

    Args:
        tensor: Tensors, or objects with a `to` method of their own (a batch of a tokenizer), nested in
            lists, tuples, named tuples, mappings and dataclasses.
        device: The target device.
        non_blocking: Do not wait for copies from pinned memory.
        skip_keys: Keys of mappings (and fields of dataclasses) whose values are left where they are.

    Returns:
        The same structure on the device. A tensor that is there already is not copied.

    Example:
        >>> send_to_device({"x": torch.ones(1), "label": "cat"}, "cpu")
        {'x': tensor([1.]), 'label': 'cat'}
    """
    skipped = () if skip_keys is None else (skip_keys,) if isinstance(skip_keys, str) else skip_keys
    # `npu` and `xpu` as bare names are not understood by every `to` method: they mean the first device.
    where = f"{device}:0" if device in {"npu", "xpu"} else device
    return _send(tensor, where, non_blocking, skipped)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Broadcast a tensor of one rank to all, which need not know its shape.

    Args:
        tensor: The tensor on one process, None on the others.

    Raises:
        DistributedOperationException: No process has a tensor, or several have; every process raises it.

    Example:
        >>> copy_tensor_to_devices(torch.ones(1))
        tensor([1.])
    """
    runtime = current_or_single()
    collectives = runtime.collectives
    mine = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
    calls = collectives.all_gather_object(mine)
    owners = [rank for rank, facts in enumerate(calls) if facts is not None]
    if len(owners) != 1:
        found = f"ranks {owners} have one" if owners else "no rank has one"
        raise DistributedOperationException(
            f"copy_tensor_to_devices needs a tensor on exactly one rank; {found}."
        )
    if tensor is None:
        dtype, shape = calls[owners[0]]
        tensor = torch.empty(shape, dtype=dtype)
    copy = tensor.detach().to(runtime.device, copy=True).contiguous()
    collectives.broadcast(copy, owners[0])
    return copy


def _send(data: Any, device: str | int | torch.device, non_blocking: bool, skipped: Collection[str]) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if type(data) is dict:
        return {
            key: value if key in skipped else _send(value, device, non_blocking, skipped)
            for key, value in data.items()
        }
    if callable(to := getattr(data, "to", None)) and not isinstance(data, type):
        return _call_to(to, device, non_blocking)
    if isinstance(data, (list, tuple)):
        return rebuild(data, [_send(value, device, non_blocking, skipped) for value in data])
    if isinstance(data, Mapping) or is_dataclass_instance(data):
        values = [
            value if key in skipped else _send(value, device, non_blocking, skipped)
            for key, value in children(data) or ()
        ]
        return rebuild(data, values)
    return data


def _call_to(to: Any, device: str | int | torch.device, non_blocking: bool) -> Any:
    """Call an object's own `to`, which may not know `non_blocking`."""
    if not non_blocking:
        return to(device)
    try:
        return to(device, non_blocking=True)
    except TypeError as error:
        if "non_blocking" not in str(error):
            raise
        return to(device)
