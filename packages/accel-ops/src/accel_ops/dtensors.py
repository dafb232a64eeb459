"""Recognise `DTensor`s without importing `torch.distributed.tensor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from torch import Tensor


def is_dtensor(value: object) -> bool:
    """Return whether a value is a `DTensor`.

    Example:
        >>> import torch
        >>> is_dtensor(torch.zeros(1))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")  # nobody has made one without importing this
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a `DTensor`, sharing its memory; any other tensor as it is.

    Example:
        >>> import torch
        >>> whole = torch.zeros(2)
        >>> local_part(whole) is whole
        True
    """
    return local_parts([tensor])[0]


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards of many tensors, as `local_part`.

    Example:
        >>> import torch
        >>> local_parts([torch.zeros(2)])
        [tensor([0., 0.])]
    """
    module = sys.modules.get("torch.distributed.tensor")
    each: Iterable[Any] = tensors
    # `to_local()` would wait for, and record, more.
    return [
        one._local_tensor if module is not None and isinstance(one, module.DTensor) else one for one in each
    ]


def by_device(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return this rank's shards of tensors, those of each device together, for operations on many at once."""
    groups: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(tensors):
        groups.setdefault(part.device, []).append(part)
    return [*groups.values()]


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, detached; a collective over all ranks of a `DTensor`'s mesh."""
    sharded: Any = tensor.detach()
    return sharded.full_tensor() if is_dtensor(sharded) else sharded
