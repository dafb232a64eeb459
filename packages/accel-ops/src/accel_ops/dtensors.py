"""Recognise `DTensor`s without importing `torch.distributed.tensor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_dtensor(value: object) -> bool:
    """Whether something is a `DTensor`.

    Example:
        >>> import torch
        >>> is_dtensor(torch.zeros(1))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")  # nobody has made one without importing this
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a `DTensor`, sharing its memory; any other tensor as it is.

    Example:
        >>> import torch
        >>> whole = torch.zeros(2)
        >>> local_part(whole) is whole
        True
    """
    sharded: Any = tensor
    return (
        sharded._local_tensor if is_dtensor(tensor) else tensor
    )  # `to_local()` would wait for, and record, more


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor, detached: all processes that have a part of a `DTensor` must ask for it."""
    sharded: Any = tensor.detach()
    return sharded.full_tensor() if is_dtensor(sharded) else sharded
