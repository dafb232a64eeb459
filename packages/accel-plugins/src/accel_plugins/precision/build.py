"""The one place where the name of a precision becomes a policy, a context or a loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import GradScaler

from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision.amp import DTYPES, FullPrecision, MixedPrecision
from accel_plugins.precision.scaling import LossScaling, ShardedGradScaler
from accel_state.accelerator_state import AcceleratorState
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.labels import has_sharded_gradients
from accel_state.partial_state import PartialState

if TYPE_CHECKING:
    from accel_plugins.roles import PrecisionPolicy
    from accel_state.labels import DistributedType


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
    if name not in DTYPES:
        raise SettingsError(f"mixed_precision={name!r}: expected one of {['no', *DTYPES]}.")
    if not torch.amp.is_autocast_available(device.type):
        raise UnsupportedError(
            f"mixed_precision={name!r}: torch has no autocast for devices of type {device.type!r}; use 'no'."
        )
    scaling = None
    if name == "fp16":
        scaler = build_scaler(device, scaler_kwargs or GradScalerKwargs(), shared=shared)
        scaling = LossScaling(scaler, master_weights=master_weights)
    return MixedPrecision(
        name=name,
        dtype=DTYPES[name],
        device_type=device.type,
        options=(autocast_kwargs or AutocastKwargs()).to_kwargs(),
        scaling=scaling,
    )


def build_scaler(device: torch.device, options: GradScalerKwargs, *, shared: bool) -> GradScaler:
    """Make a loss scaler."""
    kind = ShardedGradScaler if shared else GradScaler
    return kind(device.type, **options.to_kwargs())


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """A context in which operations run in the mixed precision of this process.

    Args:
        native_amp: Whether mixed precision is wanted; without it the context does nothing.
        autocast_kwargs: Options of autocast.

    Example:
        >>> with get_mixed_precision_context_manager():
        ...     pass
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    return build_precision(
        state.mixed_precision, state.device, autocast_kwargs, GradScalerKwargs()
    ).autocast()


def get_grad_scaler(distributed_type: DistributedType | str | None = None, **kwargs: Any) -> GradScaler:
    """A loss scaler for the device of this process.

    Args:
        distributed_type: How models are run; where each rank holds a part of the gradients, all skip a step
            together.
        **kwargs: Fields of `GradScalerKwargs`.

    Example:
        >>> get_grad_scaler(enabled=False).is_enabled()
        False
    """
    shared = has_sharded_gradients(distributed_type)
    return build_scaler(PartialState().device, GradScalerKwargs(**kwargs), shared=shared)
