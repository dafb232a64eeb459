"""Steps and clipping of parameters that may be `DTensor`s on several meshes."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from accel_ops.tree import by_device, local_parts
from accel_state import hang_monitor
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.optim import Optimizer


@contextmanager
def one_mesh_per_group(optimizer: Optimizer) -> Generator[None]:
    """Split an optimizer's groups by mesh within the block, for its step.

    torch's `foreach` and `fused` kernels accept lists of tensors only if all are on one mesh, or on none. The
    groups are restored afterwards, with the values that the step wrote.

    Raises:
        UnsupportedError: The step uses an operation that torch does not have for DTensors.
    """
    groups = [*optimizer.param_groups]
    split: list[list[dict[str, Any]]] = []
    for group in groups:
        meshes: dict[Any, list[Tensor]] = {}
        for parameter in group["params"]:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            meshes.setdefault(mesh, []).append(parameter)
        split.append([{**group, "params": parameters} for parameters in meshes.values()])
    # LBFGS keeps its own parameter list, and accepts one group only.
    is_split = any(len(by_mesh) > 1 for by_mesh in split) and "_params" not in vars(optimizer)
    if is_split:  # in place, since an optimizer that wraps another one shares the list
        optimizer.param_groups[:] = [group for by_mesh in split for group in by_mesh]
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        *_, (frame, _) = walk_tb(error.__traceback__)
        is_from_dtensor = frame.f_globals["__name__"].startswith("torch.distributed.tensor.")
        if "DTensor" not in str(error) and not is_from_dtensor:
            raise
        raise UnsupportedError(
            f"{type(optimizer).__qualname__} cannot step on sharded parameters: {str(error).splitlines()[0]} "
            "Use an optimizer that works on DTensors, or a strategy that does not shard."
        ) from error
    finally:
        if is_split:
            optimizer.param_groups[:] = groups
            for group, by_mesh in zip(groups, split, strict=True):
                group.update({**by_mesh[0], "params": group["params"]} if by_mesh else {})


def clip_norm(parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
    """Clip gradients by their norm over all ranks; return it."""
    gradients = _gradients(parameters)
    with hang_monitor.collective_scope("clip_grad_norm_"):
        norm = norm_of(gradients, float(norm_type))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_device(gradients):
        torch._foreach_mul_(parts, factor.to(parts[0].device))
    return norm


def clip_values(parameters: Sequence[Tensor], clip_value: float) -> None:
    """Clamp gradients to a value."""
    for parameter in parameters:
        if isinstance(parameter.grad, DTensor):  # a limit applies to a sum, not to its terms
            parameter.grad = _summed(parameter.grad)
    for parts in by_device(_gradients(parameters)):
        torch._foreach_clamp_min_(parts, -clip_value)
        torch._foreach_clamp_max_(parts, clip_value)


def norm_of(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the norm over ordinary tensors, the same on every rank, and `DTensor`s of several meshes.

    The result is 0-d, and the same on every rank.
    """
    if not gradients:
        return torch.zeros((), device="cpu")
    is_max = norm_type == math.inf
    powers: list[Tensor] = []  # sums of the p-th powers; maxima for the infinity norm
    for axes, group in _by_axes(gradients).items():
        parts = local_parts(group)
        nonempty = [part for part in parts if part.numel()]
        norm = get_total_norm(nonempty, norm_type) if nonempty else parts[0].new_zeros(())
        power = norm if is_max else norm**norm_type
        if axes:
            mesh, *shards = axes
            power = power.to(mesh.device_type)
            for axis in shards:
                operation = dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM
                dist.all_reduce(power, op=operation, group=mesh.get_group(axis))
        powers.append(power)
    device = next((power.device for power in powers if power.device.type != "cpu"), powers[0].device)
    together = torch.stack([power.to(device) for power in powers])
    return together.max() if is_max else together.sum() ** (1.0 / norm_type)


def _by_axes(gradients: Sequence[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
    """Group gradients by their mesh and the axes along which they are sharded."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    mesh = placements = None
    group: list[Tensor] = []
    is_partial = False
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            groups.setdefault((), []).append(gradient)
            continue
        if gradient.device_mesh is not mesh or gradient.placements != placements:  # often unchanged
            mesh, placements = gradient.device_mesh, gradient.placements
            shards = [
                axis
                for axis, placement in enumerate(placements)
                if not (placement.is_replicate() or placement.is_partial())
            ]
            group = groups.setdefault((mesh, *shards), [])
            is_partial = any(placement.is_partial() for placement in placements)
        group.append(_summed(gradient) if is_partial else gradient)
    return groups


def _summed(gradient: DTensor) -> DTensor:
    """Return a gradient without terms on several ranks."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    return gradient.redistribute(
        placements=[Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    )


def _gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
