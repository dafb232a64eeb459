"""Backward passes and optimizer steps through a DeepSpeed engine."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, final

import torch

from accel_ops.modules import without_compiler
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.deepspeed.engine import DeepSpeedEngineWrapper
    from accel_plugins.roles import Optimizers, Parameters


@final
class DeepSpeedStepper:
    """Stepper of the one engine that an `Accelerator` trains."""

    def __init__(self) -> None:
        self._wrapper: DeepSpeedEngineWrapper | None = None

    @property
    def has_engine(self) -> bool:
        """Whether `prepare()` has made an engine."""
        return self._wrapper is not None

    @property
    def wrapper(self) -> DeepSpeedEngineWrapper:
        """The engine that is trained."""
        if self._wrapper is None:
            raise SettingsError(
                "DeepSpeed has no model to train yet: pass the model and its optimizer to one call of "
                "accelerator.prepare() first."
            )
        return self._wrapper

    def register(self, wrapper: DeepSpeedEngineWrapper) -> None:
        """Train this engine from now on."""
        self._wrapper = wrapper

    def release(self) -> None:
        """Destroy the engine and release it."""
        wrapper, self._wrapper = self._wrapper, None
        if wrapper is not None:
            wrapper.engine.destroy()

    def owner_of(self, model: nn.Module) -> DeepSpeedEngineWrapper | None:
        """Return the engine of a model if it is the one that is trained, else `None`."""
        found = self._wrapper
        inner = without_compiler(model)
        return found if found is not None and inner in {found.engine, found.engine.module} else None

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Add the gradients of `loss / accumulation`; with `scale_wrt_gas=False`, of `loss`."""
        scale = kwargs.pop("scale_wrt_gas", True)
        if scale and accumulation != 1:
            loss = loss / accumulation
        self.wrapper.backward(loss, sync_gradients=sync, scale_wrt_gas=False, **kwargs)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Accumulate gradients: no backward pass within completes an optimizer step."""
        owner = self.owner_of(model)
        return nullcontext() if owner is None else owner.accumulate_without_step()

    def join(
        self, joinables: Sequence[Any], *, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Refuse uneven inputs."""
        del joinables, divide_by_initial_world_size
        raise UnsupportedError(
            "join_uneven_inputs(): DeepSpeed needs the same number of batches on every rank."
        )

    def clip_grad_norm(
        self, parameters: Parameters, max_norm: float, norm_type: float = 2.0, *, optimizers: Optimizers = ()
    ) -> Tensor | None:
        """Let the engine clip all its gradients at its next step; clip parameters outside the engine now."""
        del optimizers  # the engine has one
        clipped = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        wrapper = self.wrapper
        own = {id(one) for one in wrapper.engine.module.parameters()}
        if clipped and not any(id(one) in own for one in clipped):
            return torch.nn.utils.clip_grad_norm_(clipped, max_norm, norm_type=norm_type)
        return wrapper.clip(max_norm, norm_type)

    def clip_grad_value(
        self, parameters: Parameters, clip_value: float, *, optimizers: Optimizers = ()
    ) -> None:
        """Clamp the gradients in `.grad`; the strategy declares whether the engine leaves them there."""
        del optimizers
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def step(self, optimizer: Optimizer, closure: Callable[[], float] | None = None) -> bool:
        """Step the engine, which steps its optimizer at the end of an accumulation window."""
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure): DeepSpeed's engine steps without one; leave it out."
            )
        self._of(optimizer)
        return self.wrapper.step()

    def discard(self, optimizer: Optimizer) -> None:
        """Drop the gradients of the optimizer, also those that the engine has reduced already."""
        self._of(optimizer)
        self.wrapper.discard()

    def wrap_optimizer(self, optimizer: Any, wrapper: Callable[..., Any]) -> Any:
        """Wrap the optimizer so that it steps and drops gradients through the engine."""
        return wrapper(optimizer, step=self.step, discard=self.discard)

    def wrap_scheduler(self, scheduler: Any, optimizers: Sequence[Any], wrapper: Callable[..., Any]) -> Any:
        """Wrap the scheduler that the engine steps by itself; return `None` for any other."""
        is_own = self._wrapper is not None and self._wrapper.engine.lr_scheduler is scheduler
        return wrapper(scheduler, optimizers) if is_own else None

    def _of(self, optimizer: Any) -> None:
        if self._wrapper is not None and optimizer is not self._wrapper.optimizer:
            raise SettingsError(
                f"{type(optimizer).__name__}.step(): this optimizer is not that of the model that "
                "DeepSpeed trains; use the one that accelerator.prepare() has returned last."
            )
