"""A loss scaler for gradients of which every rank has a part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from accel_ops.dtensors import local_part
from accel_state import hang_monitor

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class ShardedGradScaler(GradScaler):
    """A `GradScaler` that skips a step on every rank if any rank has a gradient that is not finite.

    Gradients may be ordinary tensors and DTensors on several meshes, on the device and on the CPU.
    """

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,
        found_inf: Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        """Divide this rank's parts of the gradients; torch calls it once per step."""
        del allow_fp16
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    part = local_part(parameter.grad)
                    groups.setdefault((part.device, part.dtype), []).append(part)
        worst = found_inf.clone()
        for (device, _), parts in groups.items():
            flag = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, flag, inv_scale.to(device))  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage] - as GradScaler itself
            worst = torch.maximum(worst, flag.to(worst.device))
        if dist.is_initialized():
            with hang_monitor.collective_scope("all_reduce of the loss scaler"):
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        # Also where this rank has a part of no gradient: GradScaler wants one flag at least.
        return {device: worst.to(device) for device in {worst.device, *(device for device, _ in groups)}}


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Make the loss scaler for models that FSDP2 has sharded.

    Args:
        **kwargs: As of `torch.amp.GradScaler`.

    Example:
        >>> get_fsdp2_grad_scaler(device="cpu", init_scale=8.0).get_scale()
        8.0
    """
    return ShardedGradScaler(**kwargs)
