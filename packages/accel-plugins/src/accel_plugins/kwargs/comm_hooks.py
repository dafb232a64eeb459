"""Communication hooks of torch by their documented names; imported when one is registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from accel_plugins.kwargs.power_sgd import batched_power_sgd_hook
from accel_state.errors import SettingsError
from accel_state.labels import DDPCommunicationHookType as Hook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn.parallel import DistributedDataParallel

_HOOKS: Mapping[Hook, Callable[..., Any]] = {
    Hook.NO: default_hooks.allreduce_hook,
    Hook.FP16: default_hooks.fp16_compress_hook,
    Hook.BF16: default_hooks.bf16_compress_hook,
    Hook.POWER_SGD: powerSGD_hook.powerSGD_hook,
    # torch refuses annotations that are strings; a lambda has none.
    Hook.BATCHED_POWER_SGD: lambda state, bucket: batched_power_sgd_hook(state, bucket),  # noqa: PLW0108
}
_WRAPPERS: Mapping[Hook, Callable[..., Any]] = {
    Hook.FP16: default_hooks.fp16_compress_wrapper,
    Hook.BF16: default_hooks.bf16_compress_wrapper,
}


def register(
    model: DistributedDataParallel, hook: Hook, wrapper: Hook, power_sgd_options: Mapping[str, Any] | None
) -> None:
    """Register a communication hook.

    Args:
        model: A wrapped model that has no hook yet.
        hook: The hook.
        wrapper: `FP16` or `BF16` to compress the hook's messages further, else `NO`.
        power_sgd_options: Arguments of `PowerSGDState`; `None` for hooks that have no state.
    """
    function = _HOOKS[hook]
    if wrapper is not Hook.NO:
        function = _WRAPPERS[wrapper](function)
    state: Any = model.process_group
    if power_sgd_options is not None:
        try:
            state = powerSGD_hook.PowerSGDState(**{"process_group": state, **power_sgd_options})
        except TypeError as error:
            raise SettingsError(
                f"DistributedDataParallelKwargs(comm_state_option={power_sgd_options!r}): {error}."
            ) from None
    model.register_comm_hook(state, function)
