"""Optimizers that step within the backward pass: Lomo and AdaLomo (https://github.com/OpenLMLab/LOMO)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_state.available import require
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from accel_train.optimizer import AcceleratedOptimizer


def fused_backward(
    optimizers: Iterable[AcceleratedOptimizer], loss: Tensor, learning_rate: float | None
) -> None:
    """Let every optimizer of lomo-optim run the backward pass, in which it steps."""
    require("lomo", "lomo_backward()")
    if learning_rate is None:
        raise SettingsError(
            "lomo_backward(learning_rate=None): Lomo steps in here, so give the learning rate."
        )
    fused: list[Any] = [one.optimizer for one in optimizers if _is_fused(one.optimizer)]
    if not fused:
        names = [type(one.optimizer).__qualname__ for one in optimizers]
        raise SettingsError(
            f"lomo_backward() needs a prepared optimizer of lomo-optim (Lomo or AdaLomo), and found {names}; "
            "use backward() for others."
        )
    for optimizer in fused:
        optimizer.fused_backward(loss, learning_rate)


def _is_fused(optimizer: object) -> bool:
    return any(kind.__module__.partition(".")[0] == "lomo_optim" for kind in type(optimizer).__mro__)
