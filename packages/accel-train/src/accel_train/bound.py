"""Backward passes and optimizer steps, composed once with the hooks of the strategy and the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from accel_ops.modules import replace_forward
from accel_ops.tree import recursively_apply
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from accel_plugins.strategy import Strategy
    from accel_state.gradient_state import GradientState


def bind_backward(
    strategy: Strategy, engine: EngineCalls | None, hook: Callable[[], None] | None
) -> Callable[..., None]:
    """Return the backward pass of a run, as `Stepper.backward`."""
    backward = strategy.stepper.backward if engine is None else engine.backward
    if hook is None:
        return backward

    def with_hook(loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        backward(loss, accumulation=accumulation, sync=sync, **kwargs)
        if not sync:
            hook()

    return with_hook


def bind_step(
    step: Callable[..., bool | Tensor], hooks: Sequence[Callable[[], None] | None]
) -> Callable[..., bool | Tensor]:
    """Return a step of an optimizer that calls hooks afterwards."""
    calls = [hook for hook in hooks if hook is not None]
    if not calls:
        return step

    def with_hooks(*args: Any) -> bool | Tensor:
        stepped = step(*args)
        for call in calls:
            call()
        return stepped

    return with_hooks


@final
class EngineCalls:
    """Calls of models whose engine runs forward and backward at once."""

    def __init__(self, strategy: Strategy, state: GradientState) -> None:
        self._train_step: Any = strategy.train_step
        self._name = strategy.name
        self._state = state
        self._returned: Any = WeakIdKeyDictionary()

    def route(self, model: nn.Module) -> None:
        """Route calls in training mode, with gradients enabled, through the engine."""

        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def routed(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not (model.training and torch.is_grad_enabled()):
                    return forward(model, *args, **kwargs)
                output = self._train_step(
                    model,
                    lambda *args, **kwargs: forward(model, *args, **kwargs),
                    args,
                    kwargs,
                    accumulation=self._state.num_steps,
                    sync=self._state.sync_gradients,
                )
                recursively_apply(self._remember, output)
                return output

            return routed

        replace_forward(model, around)

    def backward(self, loss: Tensor, *, accumulation: int, sync: bool, **kwargs: Any) -> None:
        """Accept a loss whose gradients the engine has computed.

        Raises:
            SettingsError: The loss is not the engine's, or there are arguments for a backward pass.
        """
        del accumulation, sync
        if kwargs or loss not in self._returned:
            what = f"arguments {', '.join(kwargs)}" if kwargs else "a tensor that no model returned"
            raise SettingsError(
                f"backward() got {what}: the strategy {self._name!r} computes gradients when the model is "
                "called, of the loss that it returns; pass that very tensor, and nothing else."
            )

    def _remember(self, tensor: Tensor) -> Tensor:
        self._returned[tensor] = True
        return tensor
