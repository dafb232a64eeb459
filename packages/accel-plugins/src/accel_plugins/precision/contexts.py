"""Mixed precision by hand: the context and the loss scaler of the present process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from accel_plugins.kwargs.amp import AutocastKwargs, GradScalerKwargs
from accel_plugins.precision.build import build_precision, build_scaler
from accel_state.accelerator_state import AcceleratorState
from accel_state.labels import has_sharded_gradients
from accel_state.partial_state import PartialState

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler

    from accel_state.labels import DistributedType


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
