"""Backward passes and optimizer steps with sharded gradients."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from accel_ops.dtensors import by_device, local_parts
from accel_ops.modules import without_compiler
from accel_plugins.sharding.optimizers import one_mesh_per_group
from accel_plugins.strategies.torch_step import TorchStepper
from accel_state import hang_monitor
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import Tensor, nn

    from accel_plugins.roles import PrecisionPolicy


def sharded_stepper(precision: PrecisionPolicy, strategy: str) -> TorchStepper:
    """Return the stepper of parameters that may be `DTensor`s on several meshes."""
    return TorchStepper(
        precision=precision,
        no_sync_of=_no_sync,
        join_of=partial(_refuse_join, strategy),
        around_backward=partial(hang_monitor.collective_scope, "backward"),
        around_step=one_mesh_per_group,
        clip_norm=_clip_norm,
        clip_value=_clip_value,
    )


def _refuse_join(strategy: str, *_: Any) -> NoReturn:
    raise UnsupportedError(
        f"join(): under the strategy {strategy!r} every rank has parts of the parameters, and none can "
        "finish early; use even_batches=True."
    )


def _clip_norm(parameters: Tensor | list[Tensor], max_norm: float, norm_type: float) -> Tensor:
    gradients = _gradients(parameters)
    with hang_monitor.collective_scope("clip_grad_norm_"):
        norm = norm_of(gradients, float(norm_type))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parts in by_device(gradients):
        torch._foreach_mul_(parts, factor.to(parts[0].device))  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - documented
    return norm


def _clip_value(parameters: Tensor | list[Tensor], clip_value: float) -> None:
    for parts in by_device(_gradients(parameters)):
        torch._foreach_clamp_min_(parts, -clip_value)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
        torch._foreach_clamp_max_(parts, clip_value)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def norm_of(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the norm over ordinary tensors, the same on every rank, and `DTensor`s of several meshes.

    The result is 0-d, and the same on every rank.
    """
    if not gradients:
        return torch.zeros(())
    groups = _by_axes(gradients)
    powers = [_power_along(axes, local_parts(group), norm_type) for axes, group in groups.items()]
    device = next((one.device for one in powers if one.device.type != "cpu"), powers[0].device)
    together = torch.stack([one.to(device) for one in powers])
    return together.max() if norm_type == math.inf else together.sum() ** (1.0 / norm_type)


def _by_axes(gradients: Sequence[Tensor]) -> dict[tuple[Any, ...], list[Tensor]]:
    """Group gradients by their mesh and those of its axes along which they are sharded."""
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    mesh = placements = None
    group: list[Tensor] = []
    replicated: list[Any] = []
    is_partial = False
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            groups.setdefault((), []).append(gradient)
            continue
        if gradient.device_mesh is not mesh or gradient.placements != placements:  # else like the one before
            mesh, placements = gradient.device_mesh, gradient.placements
            replicated = [Replicate() if one.is_partial() else one for one in placements]
            shards = [axis for axis, one in enumerate(replicated) if not one.is_replicate()]
            group = groups.setdefault((mesh, *shards), [])
            is_partial = replicated != [*placements]
        group.append(gradient.redistribute(placements=replicated) if is_partial else gradient)
    return groups


def _power_along(axes: tuple[Any, ...], parts: Sequence[Tensor], norm_type: float) -> Tensor:
    """Sum the p-th powers of the norms over shards and ranks; the maximum for the infinity norm."""
    nonempty = [part for part in parts if part.numel()]
    norm = get_total_norm(nonempty, norm_type) if nonempty else parts[0].new_zeros(())
    largest = norm_type == math.inf
    power = norm if largest else norm**norm_type
    if axes:
        mesh, *shards = axes
        power = power.to(mesh.device_type)
        for axis in shards:
            dist.all_reduce(
                power, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=mesh.get_group(axis)
            )
    return power


def _gradients(parameters: Tensor | list[Tensor]) -> list[Tensor]:
    each = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    return [one.grad for one in each if one.grad is not None]


@contextmanager
def _no_sync(model: nn.Module) -> Generator[None]:
    inner = without_compiler(model)
    if not isinstance(inner, FSDPModule):
        yield
        return
    inner.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        inner.set_requires_gradient_sync(True)
