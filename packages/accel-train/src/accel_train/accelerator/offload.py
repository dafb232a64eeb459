"""Move states of an `Accelerator` to the host and back; what needs them is refused in between."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from accel_ops.modules import replaced_attributes
from accel_plugins.host_copies import STATE_KINDS, StateKind
from accel_plugins.strategy import Feature
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from accel_plugins.strategy import Strategy
    from accel_train.accelerator import Accelerator

_ALL: set[StateKind] = {*STATE_KINDS}
_NEEDED: dict[str, set[StateKind]] = {
    "backward": {"parameters", "gradients"},
    "lomo_backward": _ALL,
    "clip_grad_norm_": {"gradients"},
    "clip_grad_value_": {"gradients"},
    "unscale_gradients": {"gradients"},
    "save_state": {"parameters", "optimizer"},
    "load_state": {"parameters", "optimizer"},
    "save_model": {"parameters"},
    "get_state_dict": {"parameters"},
    "named_full_parameters": {"parameters"},
    "weight_source": {"parameters"},
}
"""The states that each method of `Accelerator` reads or writes."""
_OF_OPTIMIZERS: dict[str, set[StateKind]] = {"step": _ALL, "zero_grad": {"gradients"}}


def offload(accelerator: Accelerator, include: Collection[StateKind] | None) -> None:
    """Move states to the host; those that are there stay."""
    parts = accelerator._parts
    kinds = _checked(include, "offload_states")
    parts.strategy.require(Feature.OFFLOADED_STATES, "offload_states()")
    optimizers = [wrapped.optimizer for wrapped in parts.prepared.optimizers]
    try:
        missing: list[StateKind] = [kind for kind in kinds if kind not in parts.strategy.offloaded]
        parts.strategy.offload_states(missing, parts.prepared.models, optimizers)
    finally:
        guard(accelerator)


def reload(accelerator: Accelerator, include: Collection[StateKind] | None) -> None:
    """Move states back to the device; those that are there stay."""
    strategy = accelerator._parts.strategy
    asked = _checked(include, "reload_states")
    kinds: list[StateKind] = [kind for kind in asked if kind in strategy.offloaded]
    if kinds:
        strategy.reload_states(kinds)
        guard(accelerator)


def require(strategy: Strategy, what: str, kinds: Collection[StateKind]) -> None:
    """Raise `RuntimeError` if states are on the host."""
    if off := sorted({*kinds} & {*strategy.offloaded}):
        raise RuntimeError(
            f"{what} needs states that offload_states() has moved to the host ({', '.join(off)}). Call "
            "accelerator.reload_states() first."
        )


def guard(accelerator: Accelerator) -> None:
    """Refuse what needs the states that are on the host now, and nothing else."""
    parts = accelerator._parts
    if parts.guard is not None:
        parts.guard.close()
    parts.guard = stack = ExitStack()
    off = {*parts.strategy.offloaded}

    def refusals(needed: Mapping[str, set[StateKind]], prefix: str = "") -> dict[str, Callable[..., None]]:
        return {
            name: _refusal(parts.strategy, f"{prefix}{name}()", kinds)
            for name, kinds in needed.items()
            if off & kinds
        }

    stack.enter_context(replaced_attributes(accelerator, refusals(_NEEDED)))
    for optimizer in parts.prepared.optimizers:
        methods = refusals(_OF_OPTIMIZERS, "optimizer.")
        stack.enter_context(replaced_attributes(optimizer, methods))
    if "parameters" in off:
        modules = {id(part): part for model in parts.prepared.models for part in model.modules()}
        for module in modules.values():
            refusal = _refusal(parts.strategy, f"a call of {type(module).__name__}", {"parameters"})
            stack.callback(module.register_forward_pre_hook(refusal, prepend=True).remove)
            # The compiler takes no notice of new hooks.
            stack.enter_context(replaced_attributes(module, {"_compiled_call_impl": None}))


def _refusal(strategy: Strategy, what: str, kinds: Collection[StateKind]) -> Callable[..., None]:
    def refuse(*_: Any, **__: Any) -> None:
        require(strategy, what, kinds)

    return refuse


def _checked(include: Collection[StateKind] | None, function: str) -> list[StateKind]:
    kinds: Collection[Any] = STATE_KINDS if include is None else include
    if isinstance(kinds, str) or not {*kinds} <= _ALL:
        raise SettingsError(f"{function}(include={include!r}): expected some of {', '.join(STATE_KINDS)}.")
    return [kind for kind in STATE_KINDS if kind in kinds]
