"""The one place where the name of a precision becomes a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import GradScaler

from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision.amp import FullPrecision, MixedPrecision
from accel_plugins.precision.scaling import LossScaling
from accel_plugins.precision.sharded_scaler import ShardedGradScaler
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from accel_plugins.roles import PrecisionPolicy

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALED = frozenset({"fp16"})


def build_precision(
    name: str,
    device: torch.device,
    autocast_kwargs: AutocastKwargs | None = None,
    scaler_kwargs: GradScalerKwargs | None = None,
    *,
    shared: bool = False,
    master_weights: bool = False,
) -> PrecisionPolicy:
    """Make the policy of a run.

    Args:
        name: `"no"`, `"bf16"` or `"fp16"`.
        device: Where models compute.
        autocast_kwargs: Options of autocast; not used by `"no"`.
        scaler_kwargs: Options of the loss scaler; used by `"fp16"` alone.
        shared: Whether ranks have parts of the gradients, and so have to look together whether all are
            finite.
        master_weights: Whether the strategy puts trained parameters into float32.

    Raises:
        SettingsError: There is no such precision.
        UnsupportedError: The device has no autocast, or the precision is not available.

    Example:
        >>> policy = build_precision("bf16", torch.device("cpu"))
        >>> with policy.autocast():
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if name == "no":
        return FullPrecision(device_type=device.type)
    if name not in _DTYPES:
        raise SettingsError(f"mixed_precision={name!r}: expected one of {['no', *_DTYPES]}.")
    if not torch.amp.is_autocast_available(device.type):
        raise UnsupportedError(
            f"mixed_precision={name!r}: torch has no autocast for devices of type {device.type!r}; use 'no'."
        )
    scaling = None
    if name in _SCALED:
        scaler = build_scaler(device, scaler_kwargs or GradScalerKwargs(), shared=shared)
        scaling = LossScaling(scaler, master_weights=master_weights)
    return MixedPrecision(
        name=name,
        dtype=_DTYPES[name],
        device_type=device.type,
        options=(autocast_kwargs or AutocastKwargs()).to_kwargs(),
        scaling=scaling,
    )


def build_scaler(device: torch.device, options: GradScalerKwargs, *, shared: bool) -> GradScaler:
    """Make a loss scaler."""
    kind = ShardedGradScaler if shared else GradScaler
    return kind(device.type, **options.to_kwargs())
