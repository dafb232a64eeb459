"""Backward passes and optimizer steps with sharded gradients."""

from __future__ import annotations

import math
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import get_total_norm

from accel_ops.dtensors import local_parts
from accel_ops.modules import without_compiler
from accel_plugins.sharding.optimizers import one_mesh_per_group
from accel_plugins.strategies.torch_step import TorchStepper, unscaled
from accel_state import hang_monitor
from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.roles import PrecisionPolicy


class ShardedStepper:
    """Stepper of parameters that may be `DTensor`s on several meshes.

    Args:
        precision: Scales losses and steps optimizers.
        name: Of the strategy, for messages.
    """

    def __init__(self, *, precision: PrecisionPolicy, name: str) -> None:
        self._precision = precision
        self._name = name
        self._inner = TorchStepper(
            precision=precision,
            no_sync_of=_no_sync,
            around_backward=partial(hang_monitor.collective_scope, "backward"),
        )

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        self._inner.backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate unsharded gradients without reducing them."""
        return _no_sync(model)

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Refuse uneven inputs: every rank is needed to gather parameters."""
        del joinables, divide_by_initial_world_size
        raise UnsupportedError(
            f"join(): under the strategy {self._name!r} every rank has parts of the parameters, and none can "
            "finish early; use even_batches=True."
        )

    def clip_grad_norm(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> Tensor:
        """Scale the gradients down to a norm of at most `max_norm`; return the norm before that."""
        gradients = _gradients(unscaled(self._precision, parameters, optimizers))
        with hang_monitor.collective_scope("clip_grad_norm_"):
            norm = norm_of(gradients, float(norm_type))
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parts in _by_device(gradients).values():
            torch._foreach_mul_(parts, factor.to(parts[0].device))  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - documented
        return norm

    def clip_grad_value(
        self,
        parameters: Tensor | Iterable[Tensor],
        clip_value: float,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`."""
        for parts in _by_device(_gradients(unscaled(self._precision, parameters, optimizers))).values():
            torch._foreach_clamp_min_(parts, -clip_value)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]
            torch._foreach_clamp_max_(parts, clip_value)  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step the optimizer; return False if it was skipped: gradients of some rank were not finite."""
        with one_mesh_per_group(optimizer):
            return self._inner.step(optimizer, closure)


def norm_of(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """Compute the norm over sharded gradients, along the axes of several meshes.

    Args:
        gradients: Ordinary tensors, of which every rank has the same, and `DTensor`s.
        norm_type: The p of the norm.

    Returns:
        The same 0-d tensor on every rank.
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


def _by_device(gradients: Sequence[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for part in local_parts(gradients):
        groups.setdefault(part.device, []).append(part)
    return groups


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
