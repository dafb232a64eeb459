"""Documented FSDP2 functions that take an `Accelerator`; `prepare` calls replacements of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from accel_ops.tree import local_part
from accel_plugins.fsdp.blocks import (
    blocks,
    checkpoint_activations,
    fsdp2_prepare_auto_wrap_policy,
    recomputed,
)
from accel_plugins.sharding.state import strip_wrapper_prefixes
from accel_plugins.sharding.wrap import load_from_rank0, switch_parameters
from accel_plugins.strategy import Bundle
from accel_state.errors import SettingsError, UnsupportedError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_train.accelerator import Accelerator


def fsdp2_prepare_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Shard a model in place, as `prepare` does; create its optimizers afterwards.

    Args:
        accelerator: An `Accelerator` with an FSDP plugin of version 2.
        model: A model that is the same on every rank.

    Raises:
        UnsupportedError: The accelerator does not use FSDP2.
    """
    strategy = accelerator._parts.strategy
    if not accelerator.is_fsdp2:
        raise UnsupportedError(f"fsdp2_prepare_model(): the strategy is {strategy.name!r}, not 'fsdp2'.")
    bundle = Bundle(models=[model])
    strategy.check(bundle)
    options = replacements(accelerator)
    options.pop("shard", None)  # the replacement itself may call this function
    return strategy.wrap(bundle, **options).models[0]


def fsdp2_apply_ac(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Apply activation checkpointing to the blocks of a model, before it is sharded.

    Args:
        accelerator: Its FSDP plugin has the wrap policy, and selects other modules than blocks if it does.
        model: Changed in place.

    Returns:
        The model.
    """
    plugin = accelerator.state.fsdp_plugin
    inner = blocks(model, fsdp2_prepare_auto_wrap_policy(plugin, model), set())[:-1]
    for module in recomputed(model, plugin, inner):
        checkpoint_activations(module)
    return model


def fsdp2_canonicalize_names(named_params: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return parameters by their names in the unwrapped model.

    Example:
        >>> fsdp2_canonicalize_names({"layer._checkpoint_wrapped_module.weight": 1})
        {'layer.weight': 1}
    """
    return {
        strip_wrapper_prefixes(name).removeprefix("module."): value
        for name, value in dict(named_params).items()
    }


def fsdp2_load_full_state_dict(
    accelerator: Accelerator, model: nn.Module, full_sd: Mapping[str, Tensor], cpu_offload: bool = False
) -> nn.Module:
    """Load a full state dict that only the main process has into a sharded model, tensor by tensor.

    Args:
        accelerator: The `Accelerator` that has sharded the model.
        model: The sharded model, also on the meta device.
        full_sd: Full state dict; ignored on other ranks.
        cpu_offload: Whether parameters stay on the CPU.

    Returns:
        The model.
    """
    runtime = accelerator.state.runtime
    load_from_rank0(model, full_sd, runtime, on_cpu=cpu_offload)
    return model


# These names still refer to our functions when a program has replaced the public ones.
_SHARD, _LOAD = fsdp2_prepare_model, fsdp2_load_full_state_dict


def replacements(accelerator: Any) -> dict[str, Any]:
    """Return a program's replacements of the functions above, as keyword arguments of the wrapper."""
    replaced: dict[str, Any] = {}
    if fsdp2_prepare_model is not _SHARD:
        replaced["shard"] = partial(fsdp2_prepare_model, accelerator)
    if fsdp2_load_full_state_dict is not _LOAD:
        replaced["load"] = partial(fsdp2_load_full_state_dict, accelerator)
    return replaced


def fsdp2_switch_optimizer_parameters(optimizer: Optimizer, mapping: Mapping[Any, Tensor]) -> None:
    """Replace the parameters of an optimizer by the sharded model's parameters, in place.

    Args:
        optimizer: Created with the unsharded parameters.
        mapping: From an old parameter, or its `data_ptr()`, to the new parameter.

    Raises:
        SettingsError: The mapping lacks a parameter of the optimizer.
    """
    by_address = {key: value for key, value in mapping.items() if isinstance(key, int)}
    by_identity = {id(key): value for key, value in mapping.items() if isinstance(key, Tensor)}
    replacements: dict[Tensor, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            new = by_identity.get(id(parameter))
            if new is None:
                new = by_address.get(local_part(parameter).data_ptr())
            if new is None:
                raise SettingsError(
                    f"fsdp2_switch_optimizer_parameters(): the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is not in the mapping and would not be trained."
                )
            replacements[parameter] = new
    switch_parameters(optimizer, replacements)
