"""Backward passes and optimizer steps under FSDP1, whose gradients are shards of flat tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins.strategies.torch_step import unscaled
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.fsdp.roots import FsdpRoots
    from accel_plugins.strategies.torch_step import TorchStepper


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp1Stepper:
    """Stepper that lets FSDP1 compute gradient norms.

    Args:
        roots: The models that were wrapped.
        inner: Does everything else.
    """

    roots: FsdpRoots
    inner: TorchStepper

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation` to the parameters."""
        self.inner.backward(loss, accumulation=accumulation, sync=sync, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate unsharded gradients without reducing them."""
        return self.inner.no_sync(model)

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Refuse uneven inputs: every rank has to gather parameters equally often."""
        del joinables, divide_by_initial_world_size
        raise UnsupportedError("FSDP1 cannot train on batches that run out earlier on some ranks.")

    def clip_grad_norm(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> Tensor:
        """Scale the gradients of a model down to a norm of at most `max_norm`; return the norm before that.

        Raises:
            SettingsError: The parameters are not all those of one prepared model.
        """
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        root = self.roots.of_parameters(clipped)
        if root is None:
            return self.inner.clip_grad_norm(clipped, max_norm, norm_type, optimizers=optimizers)
        absent = {id(one) for one in root.parameters() if one.requires_grad} - {id(one) for one in clipped}
        if absent:
            raise SettingsError(
                f"clip_grad_norm_() was given {len(clipped)} parameters, and {len(absent)} more of the same "
                "model are "
                "missing. FSDP1 computes the norm over all of them: pass model.parameters() of the prepared "
                "model."
            )
        unscaled(self.inner.precision, clipped, optimizers)
        with hang_monitor.collective_scope("clip_grad_norm_"):
            return root.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value(
        self,
        parameters: Tensor | Iterable[Tensor],
        clip_value: float,
        *,
        optimizers: Iterable[Optimizer] = (),
    ) -> None:
        """Clamp every gradient to `[-clip_value, clip_value]`."""
        self.inner.clip_grad_value(parameters, clip_value, optimizers=optimizers)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool | Tensor:
        """Step the optimizer; return False if it was skipped because gradients were not finite."""
        return self.inner.step(optimizer, closure)
