"""DeepSpeed's engine with the manners of a usual loop: backward, clip, step, each when it is called."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch

from accel_state import hang_monitor
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from torch import Tensor

_BACKWARD_ARGUMENTS = frozenset({"retain_graph", "scale_wrt_gas"})


@final
class DeepSpeedEngineWrapper:
    """An engine, and what is known about its gradients since the last step.

    `backward` brings gradients together where it completes a step; `step` then updates the model. Between the
    two, gradients can be clipped or thrown away.

    Args:
        engine: What `deepspeed.initialize` returned first.
        groups: The parameters of every group of the optimizer, as it was before the engine took it over.
    """

    def __init__(self, engine: Any, *, groups: Sequence[Sequence[Tensor]] = ()) -> None:
        self.engine = engine
        self.groups = groups
        self._has_gradients = False
        self._holds = 0
        self._limit: float | None = None
        self._known: dict[str, Any] = {}
        self._carried: dict[int, list[Tensor]] = {}

    @property
    def optimizer(self) -> Any:
        """What steps: DeepSpeed's optimizer, or at stage 0 in float32 the one that was given."""
        return self.engine.optimizer

    def backward(self, loss: Tensor, sync_gradients: bool = True, **kwargs: Any) -> None:
        """Compute gradients.

        Args:
            loss: 0-d, the output of the engine or made from it.
            sync_gradients: Whether they complete a step, and so are brought together.
            **kwargs: `retain_graph`; and `scale_wrt_gas=False` where the loss is divided by the number of
                micro-batches already.

        Raises:
            UnsupportedError: The engine has no other arguments.
        """
        unknown = kwargs.keys() - _BACKWARD_ARGUMENTS
        if unknown:
            raise UnsupportedError(
                f"backward({', '.join(sorted(unknown))}): DeepSpeed's engine computes the gradients of a "
                "0-d loss, with retain_graph as its only option."
            )
        if self._is_complete:
            self._carried = self._complete_gradients()
        if self._skips_scaling:
            loss = loss.float() * _scale_of(self.optimizer)
        self.engine.set_gradient_accumulation_boundary(is_boundary=sync_gradients and not self._holds)
        with hang_monitor.collective_scope("backward"):
            self.engine.backward(loss, **kwargs)
        self._has_gradients = True
        if self._carried and self._is_complete:
            self._add_carried()
        self._known.clear()

    @contextmanager
    def hold(self) -> Generator[None]:
        """A block in which no backward pass completes a step."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Let the next step clip gradients.

        Args:
            max_norm: The largest norm allowed.
            norm_type: 2; where gradients are not divided, any.

        Returns:
            The norm before that, 0-d; `None` where gradients are not complete, or the engine finds it only
            when it steps.

        Raises:
            SettingsError: The configuration has another norm.
            UnsupportedError: The engine knows no other `norm_type`.
        """
        configured = self.engine.gradient_clipping()
        if configured and configured != max_norm:
            raise SettingsError(
                f"clip_grad_norm_(max_norm={max_norm!r}) contradicts gradient_clipping={configured!r} in the "
                "DeepSpeed configuration; set that to 'auto', or use the same number."
            )
        if not hasattr(
            self.optimizer, "clip_grad"
        ):  # the one that was given: gradients are where they always are
            return self._clip_plainly(max_norm, norm_type) if self._is_complete else None
        if norm_type != 2:
            raise UnsupportedError(
                f"clip_grad_norm_(norm_type={norm_type!r}): DeepSpeed clips by the 2-norm; leave norm_type "
                "out."
            )
        self._limit = max_norm
        return self._norm() if self._is_complete else None

    def step(self) -> bool:
        """Update the model with the gradients since the last step; without any, do nothing.

        Returns:
            False if gradients were not finite, so that nothing was done.

        Raises:
            UnsupportedError: They were not brought together.
        """
        if not self._has_gradients:
            return True
        if not self._is_complete:
            raise UnsupportedError(
                "optimizer.step() after a backward pass within no_sync(): DeepSpeed steps only with "
                "gradients that were brought together; run the last backward pass of a step outside."
            )
        configured = self.engine.gradient_clipping()
        if configured and not hasattr(self.optimizer, "clip_grad"):  # the engine would not tell the norm
            self._clip_plainly(configured)
        with hang_monitor.collective_scope("step"), self._clipping():
            self.engine.step()
        self._clear_saved()
        return self.engine.was_step_applied()

    def discard(self) -> None:
        """Throw the gradients since the last step away."""
        if not self._has_gradients:
            return
        optimizer = self.optimizer
        optimizer.zero_grad(set_to_none=True)
        self.engine.zero_grad()
        for name in ("averaged_gradients", "all_grad_tensors"):
            kept = getattr(optimizer, name, None) or {}
            for key in kept:
                kept[key] = None
        for name in ("_release_preflattened_grad_buffers", "clear_hp_grads", "clear_lp_grads"):
            clear: Callable[[], Any] | None = getattr(optimizer, name, None)
            if clear is not None:
                clear()
        if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
            optimizer.reset_cpu_buffers()
        if hasattr(optimizer, "micro_step_id"):
            optimizer.micro_step_id = -1 if hasattr(optimizer, "bit16_groups") else 0
        self._clear_saved()

    def get_global_grad_norm(self) -> float | None:
        """The norm of the gradients of the last step, before clipping; `None` before any."""
        norm = self.engine.get_global_grad_norm()
        return norm.item() if isinstance(norm, torch.Tensor) else norm

    @property
    def _skips_scaling(self) -> bool:
        """Whether the engine's `step` divides by a loss scale that its `backward` leaves out.

        So it is at stage 0 in float16, since engines have a method `scale`: they ask only the optimizers of
        stages 1 to 3.
        """
        optimizer = self.optimizer
        scaled = hasattr(optimizer, "loss_scale_config") and not hasattr(optimizer, "scale_if_loss")
        return scaled and hasattr(self.engine, "scale")

    def _clip_plainly(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients that are where they always are."""
        parameters = self.engine.module.parameters()
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.engine._global_grad_norm = norm  # what `get_global_grad_norm` tells
        return norm

    @property
    def _is_complete(self) -> bool:
        return self._has_gradients and self.engine.is_gradient_accumulation_boundary()

    def _complete_gradients(self) -> dict[int, list[Tensor]]:
        """Gradients of a complete step, which stages 1 and 2 replace when another pass completes it."""
        optimizer = self.optimizer
        if not hasattr(optimizer, "bit16_groups") or optimizer.cpu_offload:
            return {}
        kept: dict[int, list[Tensor] | None] = optimizer.averaged_gradients
        return {
            index: [gradient.clone() for gradient in gradients]
            for index, gradients in kept.items()
            if gradients is not None and not optimizer._use_compact_grad_partition_buffer(index)
        }

    def _add_carried(self) -> None:
        """Add them to what the other pass has found."""
        for index, gradients in self._carried.items():
            for now, before in zip(self.optimizer.averaged_gradients[index], gradients, strict=True):
                now.add_(before)
        self._carried = {}

    def _clear_saved(self) -> None:
        self._has_gradients = False
        self._limit = None
        self._known.clear()
        self._carried = {}

    @contextmanager
    def _clipping(self) -> Generator[None]:
        """A block in which the optimizer clips as it was told, with the norm that is known already."""
        if self._limit is None:
            yield
            return
        optimizer = self.optimizer
        before, optimizer.clip_grad = optimizer.clip_grad, self._limit
        known = dict(self._known)
        for name, value in known.items():
            vars(optimizer)[name] = lambda *_, value=value, **__: value
        try:
            yield
        finally:
            optimizer.clip_grad = before
            for name in known:
                del vars(optimizer)[name]

    def _norm(self) -> Tensor | None:
        """The norm over all ranks; what was found on the way is kept, and not found again by the step."""
        optimizer = self.optimizer
        if hasattr(optimizer, "scaled_global_norm"):
            wait: Callable[[], None] | None = getattr(optimizer, "_wait_for_offload_copies", None)
            if wait is not None:
                wait()
            total = self._known["scaled_global_norm"] = optimizer.scaled_global_norm()
        elif hasattr(optimizer, "_get_norm_groups"):
            groups = self._known["_get_norm_groups"] = optimizer._get_norm_groups()
            total = _together([torch.as_tensor(group, dtype=torch.float32) for group in groups])
        else:
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            if not gradients:
                return None
            total = torch.nn.utils.get_total_norm([gradient.float() for gradient in gradients])
        total = torch.as_tensor(total, dtype=torch.float32)
        # Where some gradient is not finite the engine says -1.
        total = torch.where(total < 0, torch.full_like(total, float("inf")), total)
        return total / _scale_of(optimizer)


def _together(norms: Sequence[Tensor]) -> Tensor:
    """The 2-norm of norms; -1 if one is, by which the engine says that it is not finite."""
    stacked = torch.stack([norm.reshape(()) for norm in norms])
    return torch.where(
        (stacked < 0).any(), torch.full_like(stacked[0], -1.0), torch.linalg.vector_norm(stacked)
    )


def _scale_of(optimizer: Any) -> float:
    config = getattr(optimizer, "loss_scale_config", None)
    return getattr(optimizer, "loss_scale", 1.0) if config is None else config.cur_scale
