"""Run DeepSpeed's engine: backward passes, clipping and steps; its stepper, optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from accel_ops.modules import replaced_attributes
from accel_plugins.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError
from accel_state.logging import get_logger
from accel_state.streams import synchronize

logger = get_logger(__name__)


@final
class DeepSpeedEngineWrapper:
    """Wrap an engine, with the state of its gradients since the last optimizer step.

    `backward` reduces gradients if it completes an accumulation window; `step` then updates the model. In
    between, gradients can be clipped.

    Args:
        engine: The engine that `deepspeed.initialize` returned.
        groups: The optimizer's original parameters, group by group.

    Attributes:
        optimizer: DeepSpeed's optimizer; at stage 0 in float32 the prepared one.
        has_gradients: Whether there are gradients since the last step.
        accumulates: Whether no backward pass completes the accumulation window, as within `no_sync`.
    """

    def __init__(self, engine: Any, *, groups: Sequence[Sequence[Tensor]] = ()) -> None:
        self.engine, self.optimizer = engine, engine.optimizer
        self.groups = groups
        self.has_gradients = False
        self.accumulates = False
        self._max_grad_norm: float | None = None
        self._plain_norm: Tensor | None = None

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients.

        Args:
            loss: Loss, 0-d, computed from the engine's output.
            sync_gradients: Whether this micro-batch completes the accumulation window: gradients are reduced.
            **kwargs: `retain_graph`; and `scale_wrt_gas=False` if the loss is already divided by the number
                of micro-batches.

        Raises:
            UnsupportedError: Stage 1 or 2 would overwrite reduced gradients of this step.
            TypeError: The engine does not have an argument.
        """
        stage = self.engine.zero_optimization_stage()
        if self._is_complete and stage in {1, 2}:
            raise UnsupportedError(
                "A second backward() before optimizer.step(): stages 1 and 2 of DeepSpeed would overwrite "
                "the reduced gradients of the first. Add the losses, or run all backward passes of a step "
                "but the last one within accelerator.no_sync(model)."
            )
        if self.engine.fp16_enabled() and not stage:  # The engine does not scale it, but unscales gradients.
            loss = loss.float() * self._scale
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients and not self.accumulates)
        with hang_monitor.collective_scope("backward"):
            self.engine.backward(loss, **kwargs)
        self.has_gradients = True

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip gradients in the next step.

        Args:
            max_norm: Largest norm allowed.
            norm_type: 2; any if gradients are not sharded.

        Returns:
            The norm before clipping, 0-d; `None` if the accumulation window is not complete, or the engine
            computes the norm only in its step.

        Raises:
            SettingsError: The configuration has another `gradient_clipping`.
            UnsupportedError: The engine does not support the `norm_type`.
        """
        configured = self.engine.gradient_clipping()
        if configured and configured != max_norm:
            raise SettingsError(
                f"clip_grad_norm_(max_norm={max_norm!r}) contradicts gradient_clipping={configured!r} "
                "in the DeepSpeed configuration. Set the latter to 'auto', or use the same number."
            )
        optimizer = self.optimizer
        is_plain = not hasattr(optimizer, "clip_grad")  # It is the prepared one; gradients are in `.grad`.
        if norm_type != 2 and not is_plain:
            raise UnsupportedError(
                f"clip_grad_norm_(norm_type={norm_type!r}): DeepSpeed clips only by the 2-norm. Remove "
                "norm_type."
            )
        self._max_grad_norm = None if is_plain else max_norm
        if is_plain or not self._is_complete:
            return self._clip_grad_attributes(max_norm, norm_type) if self._is_complete else None
        # Compute the norm over all ranks; the engine's is -1 if a gradient is not finite.
        if hasattr(optimizer, "scaled_global_norm"):
            if self.engine.zero_use_cpu_optimizer():
                synchronize(self.engine.device)  # Gradients are being copied to the host.
            total = torch.as_tensor(optimizer.scaled_global_norm(), dtype=torch.float32)
        elif hasattr(optimizer, "_get_norm_groups"):
            groups = optimizer._get_norm_groups()
            norms = torch.stack([torch.as_tensor(group, dtype=torch.float32).reshape(()) for group in groups])
            total = torch.where((norms < 0).any(), -1.0, torch.linalg.vector_norm(norms))
        else:
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            if not gradients:
                return None
            total = torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients])
        return torch.where(total < 0, float("inf"), total) / self._scale

    def step(self) -> bool:
        """Update the model with the gradients since the last step; do nothing if there are none.

        Returns:
            False if the step was skipped because gradients were not finite.

        Raises:
            UnsupportedError: The gradients were not reduced.
        """
        if not self.has_gradients:
            return True
        if not self._is_complete:
            raise UnsupportedError(
                "optimizer.step() after a backward pass within no_sync(): DeepSpeed steps only with "
                "reduced gradients. Run the last backward pass of a step outside no_sync()."
            )
        configured, optimizer = self.engine.gradient_clipping(), self.optimizer
        if configured and not hasattr(optimizer, "clip_grad"):  # The engine would not store the norm.
            self._clip_grad_attributes(configured)
        clipping = {} if self._max_grad_norm is None else {"clip_grad": self._max_grad_norm}
        with hang_monitor.collective_scope("step"), replaced_attributes(optimizer, clipping):
            self.engine.step()
        self.has_gradients, self._max_grad_norm = False, None
        return self.engine.was_step_applied()

    def discard(self) -> None:
        """Keep the gradients since the last step, as no public function of DeepSpeed discards them."""
        if self.has_gradients:
            logger.warning_once(
                "optimizer.zero_grad() between backward() and optimizer.step() has no effect: DeepSpeed's "
                "engine keeps its gradients, and the next step uses them."
            )

    def get_global_grad_norm(self) -> float | None:
        """Return the gradient norm of the last step, before clipping; `None` before the first."""
        norm = self.engine.get_global_grad_norm() if self._plain_norm is None else self._plain_norm
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    def _clip_grad_attributes(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients in the parameters' `.grad`."""
        parameters = self.engine.module.parameters()
        self._plain_norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return self._plain_norm

    @property
    def _is_complete(self) -> bool:
        return self.has_gradients and self.engine.is_gradient_accumulation_boundary()

    @property
    def _scale(self) -> float:
        """The loss scale."""
        return getattr(self.optimizer, "loss_scale", None) or 1.0


class DeepSpeedOptimizerWrapper(AcceleratedOptimizer):
    """The optimizer of an engine: it steps and drops gradients through the engine.

    Args:
        optimizer: The optimizer that `deepspeed.initialize` returned.
        **options: `step` and `discard` of `AcceleratedOptimizer`, which use the engine.
    """

    def __init__(self, optimizer: Any, **options: Any) -> None:
        # The engine has placed the state of its optimizer.
        super().__init__(optimizer, device_placement=False, **options)


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """The scheduler of an engine, which steps it whenever it updates the model.

    Args:
        scheduler: The schedule that `deepspeed.initialize` returned.
        optimizers: The engine's optimizer.
    """

    def __init__(
        self, scheduler: Any, optimizers: AcceleratedOptimizer | Sequence[AcceleratedOptimizer]
    ) -> None:
        super().__init__(scheduler, optimizers, step_per="update")

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps the schedule."""
