"""Materialise models before FSDP1 shards them, and find the parameters that it ignores."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from accel_ops.weights.tied import find_tied_parameters, retie_parameters
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_state.runtime import Runtime


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | str
) -> set[nn.Parameter]:
    """Move modules of a model to a device, and return their parameters.

    Args:
        modules: The modules, or a regular expression that matches their full names; `None` for none.
        model: The model.
        device: The device.

    Raises:
        SettingsError: No module's name matches.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, bias=False))
        >>> len(get_parameters_from_modules("1", model, "cpu"))
        1
    """
    found = modules_named(modules, model)
    return {parameter for module in found for parameter in module.to(device).parameters()}


def modules_named(modules: Iterable[nn.Module] | str | None, model: nn.Module) -> list[nn.Module]:
    """Return modules of a model that are given, or whose full names match a regular expression."""
    if not isinstance(modules, str):
        return [*(modules or ())]
    pattern = re.compile(modules)
    found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not found:
        raise SettingsError(
            f"ignored_modules={modules!r} matches the name of no module of {type(model).__name__}; "
            "model.named_modules() lists the names."
        )
    return found


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """Wrap a `param_init_fn` so that tied weights stay tied.

    Args:
        param_init_fn: Materialises one module; called module by module.
        model: The model, on the meta device.
        device: Device of the materialised parameters.

    Returns:
        A function that calls `param_init_fn` and then ties the module's tied weights again.

    Example:
        >>> with torch.device("meta"):
        ...     model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
        >>> model[1].weight = model[0].weight
        >>> def fill(module):
        ...     return module.to_empty(device="cpu", recurse=False)
        >>> init = ensure_weights_retied(fill, model, "cpu")
        >>> for module in model.modules():
        ...     _ = init(module)
        >>> model[0].weight is model[1].weight
        True
    """
    groups = find_tied_parameters(model)
    if not groups:
        return param_init_fn
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    group_of_leaf: dict[tuple[int, str], int] = {}
    for prefix, module in model.named_modules():
        for leaf, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            if name in group_of:
                group_of_leaf[id(module), leaf] = group_of[name]
    first: dict[int, nn.Parameter] = {}

    def init(module: nn.Module) -> Any:
        result = param_init_fn(module)
        for leaf, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            number = group_of_leaf.get((id(module), leaf))
            if number is None:
                continue
            if number not in first:
                first[number] = torch.nn.Parameter(parameter.to(device), parameter.requires_grad)
            setattr(module, leaf, first[number])
        return result

    return init


def materialize_from_rank0(
    model: nn.Module, runtime: Runtime, plugin: FullyShardedDataParallelPlugin, *, broadcast: bool
) -> None:
    """Materialise a model on the device of a run, and broadcast rank 0's weights if asked.

    The plugin's `param_init_fn` materialises meta modules; without one, they are allocated uninitialised.
    """
    tied = find_tied_parameters(model)
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(tensor.is_meta for tensor in own):
            if plugin.param_init_fn is not None:
                plugin.param_init_fn(module)
            else:
                module.to_empty(device=runtime.device, recurse=False)
    retie_parameters(model, tied)
    model.to(runtime.device)
    if broadcast and runtime.topology.world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            contiguous = tensor.detach().contiguous()
            runtime.collectives.broadcast(contiguous, 0)
            tensor.detach().copy_(contiguous)
