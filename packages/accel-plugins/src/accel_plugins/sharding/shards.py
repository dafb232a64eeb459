"""Shards of tensors: cut a full tensor like another one's shard, gather a full tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def shard_like(
    full: Tensor, like: Tensor, device: torch.device | None = None, *, keep_type: bool = False
) -> Tensor:
    """Copy this rank's shard of a full tensor, sharded like another tensor, without communication.

    Args:
        full: The full tensor, on any device.
        like: A tensor of the same shape; if it is not a `DTensor`, the full tensor is copied.
        device: Device of the result; that of `like` if `None`.
        keep_type: Whether the shard has the type that a library has put around that of `like`.

    Returns:
        A new tensor of the dtype of `full`, a `DTensor` if `like` is one.

    Example:
        >>> shard_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    full, target = full.detach(), like.device if device is None else device
    if not isinstance(like, DTensor):
        return torch.empty_like(full, device=target).copy_(full)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    empty = torch.empty(shape, dtype=full.dtype, device=target)
    if keep_type:
        local: Any = like.detach()
        empty = torch.empty_like(local.to_local(), dtype=full.dtype, device=target)
    shard = empty.copy_(full[where])
    meta = TensorMeta(like.shape, torch.empty(like.shape, device="meta").stride(), full.dtype)
    # `from_local` would move a shard that is offloaded to the CPU to the device of the mesh.
    return DTensor(
        shard, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False
    )  # pyright: ignore[reportCallIssue] - what FSDP does itself


def names_of_each(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Group the names of a state dict by value: tied weights have several.

    Example:
        >>> names_of_each({"a": (one := torch.ones(1)), "b": 3, "c": one})
        [(('a', 'c'), tensor([1.])), (('b',), 3)]
    """
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return [(tuple(group), state[group[0]]) for group in names.values()]


def gather_full_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """All-gather a full tensor, detached; a collective over the mesh if the tensor is a `DTensor`.

    A shard on another device than that of the collective is copied to it.
    """
    detached: Any = tensor.detach()
    if not isinstance(detached, DTensor):
        return detached
    if detached.device.type != device.type:
        detached = detached.to(device)
    return detached.full_tensor()
