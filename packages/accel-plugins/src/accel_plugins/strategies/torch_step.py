"""Backward passes and optimizer steps of the strategies whose parameters are ordinary tensors."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.roles import PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStepper:
    """Stepper of parameters that are ordinary tensors.

    Args:
        precision: Scales losses and steps optimizers.
        no_sync_of: Makes the context in which a model's gradients stay local.
        join_of: Makes the context in which ranks may finish early, from the joinables and
            `divide_by_initial_world_size`.
        around_backward: Makes a context for the duration of every backward pass.
    """

    precision: PrecisionPolicy
    no_sync_of: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    join_of: Callable[[Sequence[Any], bool], AbstractContextManager[None]] | None = None
    around_backward: Callable[[], AbstractContextManager[None]] | None = None
    step: Callable[..., bool | Tensor] = field(init=False, repr=False, compare=False)
    """Steps an optimizer, as the precision does; no call of ours in between."""

    def __post_init__(self) -> None:
        """Take the step of the precision."""
        object.__setattr__(self, "step", self.precision.step)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        del sync  # said by `no_sync` around the forward pass
        if accumulation != 1:
            loss = loss / accumulation
        loss = self.precision.scale(loss)
        if self.around_backward is None:
            loss.backward(**kwargs)
        else:
            with self.around_backward():
                loss.backward(**kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients without reducing them."""
        return nullcontext() if self.no_sync_of is None else self.no_sync_of(model)

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Let ranks have different numbers of batches, as `torch.distributed.algorithms.Join`."""
        return (
            nullcontext() if self.join_of is None else self.join_of(joinables, divide_by_initial_world_size)
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
        return torch.nn.utils.clip_grad_norm_(
            unscaled(self.precision, parameters, optimizers), max_norm, norm_type=norm_type
        )

    def clip_grad_value(
        self,
        parameters: Tensor | Iterable[Tensor],
        clip_value: float,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`."""
        torch.nn.utils.clip_grad_value_(unscaled(self.precision, parameters, optimizers), clip_value)


def unscaled(
    precision: PrecisionPolicy, parameters: Tensor | Iterable[Tensor], optimizers: Iterable[Optimizer]
) -> Tensor | list[Tensor]:
    """Unscale the gradients of the optimizers that own any of the parameters; return the parameters."""
    clipped = parameters if isinstance(parameters, torch.Tensor) else [*parameters]
    if precision.scaler is not None:
        ids = {id(clipped)} if isinstance(clipped, torch.Tensor) else {id(one) for one in clipped}
        precision.unscale(one for one in optimizers if _owns(one, ids))
    return clipped


def _owns(optimizer: Optimizer, ids: set[int]) -> bool:
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
