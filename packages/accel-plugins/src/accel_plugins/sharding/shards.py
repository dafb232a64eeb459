"""Which part of a tensor a rank holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


def part_like(full: Tensor, like: Tensor, device: torch.device | None = None) -> Tensor:
    """This rank's part of a tensor, divided as another one is; no communication.

    Args:
        full: The whole tensor, on any device.
        like: Of the same shape; what is not divided gets a copy of the whole.
        device: Where to; where `like` is if `None`.

    Returns:
        A new tensor of the dtype of `full`, a `DTensor` if `like` is one.

    Example:
        >>> part_like(torch.ones(2), torch.zeros(2))
        tensor([1., 1.])
    """
    full, target = full.detach(), like.device if device is None else device
    if not isinstance(like, DTensor):
        return torch.empty_like(full, device=target).copy_(full)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    part = torch.empty(shape, dtype=full.dtype, device=target).copy_(full[where])
    meta = TensorMeta(like.shape, torch.empty(like.shape, device="meta").stride(), full.dtype)
    # `from_local` would move a part that is kept on the CPU to the device of the mesh.
    return DTensor(
        part, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False
    )  # pyright: ignore[reportCallIssue] - what FSDP does itself


def names_of_each(state: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Bring the names of every entry of a state dict together, as tied weights have several.

    Args:
        state: Where what is tied is one object.

    Example:
        >>> names_of_each({"a": (one := torch.ones(1)), "b": 3, "c": one})
        [(('a', 'c'), tensor([1.])), (('b',), 3)]
    """
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return [(tuple(own), state[own[0]]) for own in names.values()]


def gather_full_tensor(part: Tensor, device: torch.device) -> Tensor:
    """The whole of a tensor, detached; a collective of the ranks that hold it where it is divided.

    Args:
        part: A `DTensor`, or a tensor that is whole.
        device: Where the ranks communicate; a part may be kept elsewhere.
    """
    detached: Any = part.detach()
    if not isinstance(detached, DTensor):
        return detached
    if detached.device.type != device.type:
        detached = detached.to(device)
    return detached.full_tensor()
