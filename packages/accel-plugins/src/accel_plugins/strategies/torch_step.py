"""Backward passes and optimizer steps that PyTorch computes; strategies replace single parts of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.roles import Optimizers, Parameters, PrecisionPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchStepper:
    """Stepper of parameters that PyTorch's optimizers step; by default, of ordinary tensors.

    Args:
        no_sync_of: Makes the context in which a model's gradients stay local.
        join_of: Makes the context in which ranks may finish early, from the joinables and
            `divide_by_initial_world_size`.
        around_backward: Makes a context for the duration of every backward pass.
        around_step: Makes a context for the duration of every step of an optimizer.
        clip_norm: Clips unscaled gradients; called as `clip_norm(parameters, max_norm, norm_type)`.
        clip_value: Likewise, as `clip_value(parameters, clip_value)`.
    """

    precision: PrecisionPolicy
    no_sync_of: Callable[[nn.Module], AbstractContextManager[None]] | None = None
    join_of: Callable[[Sequence[Any], bool], AbstractContextManager[None]] | None = None
    around_backward: Callable[[], AbstractContextManager[None]] | None = None
    around_step: Callable[[Optimizer], AbstractContextManager[None]] | None = None
    clip_norm: Callable[..., Tensor] = clip_grad_norm_
    clip_value: Callable[..., None] = clip_grad_value_
    step: Callable[..., bool | Tensor] = field(init=False, repr=False, compare=False)
    """Steps an optimizer, as the precision does; no call of ours in between."""

    def __post_init__(self) -> None:
        """Take the step of the precision."""
        step = self.precision.step if self.around_step is None else partial(_step_within, self)
        object.__setattr__(self, "step", step)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        del sync  # said by `no_sync` around the forward pass
        if accumulation != 1:
            loss = loss / accumulation
        if self.precision.scaler is not None:
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
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor:
        """Scale the gradients down to a norm of at most `max_norm`; return the norm before that."""
        return self.clip_norm(unscaled(self.precision, parameters, optimizers), max_norm, norm_type)

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`."""
        parameters = unscaled(self.precision, parameters, optimizers)
        several = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        if any(one.grad is not None for one in several):  # a rank's shards may be empty; torch wants one
            self.clip_value(several, clip_value)


def _step_within(stepper: TorchStepper, optimizer: Optimizer, closure: Any = None) -> bool | Tensor:
    context: Any = stepper.around_step
    with context(optimizer):
        return stepper.precision.step(optimizer, closure)


def unscaled(
    precision: PrecisionPolicy, parameters: Parameters, optimizers: Optimizers
) -> Tensor | list[Tensor]:
    """Unscale the gradients of the optimizers that own any of the parameters; return the parameters."""
    clipped = parameters if isinstance(parameters, torch.Tensor) else [*parameters]
    if precision.scaler is not None:
        ids = {id(clipped)} if isinstance(clipped, torch.Tensor) else {id(one) for one in clipped}
        precision.unscale(one for one in optimizers if _owns(one, ids))
    return clipped


def _owns(optimizer: Optimizer, ids: set[int]) -> bool:
    return any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
