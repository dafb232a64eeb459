"""Select the modules that FSDP shards separately, ignores or recomputes; materialise meta weights."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from accel_ops.modules import get_module_children_bottom_up, wrap_forward
from accel_ops.weights.tensors import find_tied_parameters
from accel_state.errors import SettingsError, UnsupportedError, did_you_mean
from accel_state.libraries import compare_versions
from accel_state.torch_private import tree_leaves, tree_map

if TYPE_CHECKING:
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

POLICIES: tuple[str, ...] = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
"""The names of the built-in wrap policies."""

LEAVES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that use parameters of submodules without calling them, always or in their fast path."""


def classes_named(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """Find a model's module classes by name; without names, those in the model's `_no_split_modules`."""
    declared = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    wanted = [*(names or sorted(declared))]
    classes: dict[str, set[type[nn.Module]]] = {}
    for module in model.modules():
        classes.setdefault(type(module).__name__, set()).add(type(module))
    missing = [name for name in wanted if name not in classes]
    if names and missing:
        hint = did_you_mean(missing[0], classes, f"it has {', '.join(sorted(classes))}.")
        raise SettingsError(
            f"transformer_cls_names_to_wrap={wanted!r}: {type(model).__name__} has no module of a class "
            f"{missing[0]!r}; {hint}"
        )
    if len(missing) == len(wanted):
        raise SettingsError(
            f"auto_wrap_policy='transformer_based_wrap': {type(model).__name__} has no module of the classes "
            f"{wanted} of its _no_split_modules: set transformer_cls_names_to_wrap."
        )
    return {kind for name in wanted for kind in classes.get(name, ())}


def size_policy(least: int) -> Callable[[nn.Module], bool]:
    """Return a wrap policy by the number of parameters outside of selected submodules.

    It is called bottom-up, and never selects modules without a forward, such as `ModuleList`.
    """
    wrapped: set[int] = set()

    def selects(module: nn.Module) -> bool:
        sizes = {id(p): p.numel() for p in module.parameters() if id(p) not in wrapped}
        if sum(sizes.values()) < max(least, 1) or not _has_forward(module):
            return False
        wrapped.update(sizes)
        return True

    return selects


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """Return the wrap policy of an FSDP2 plugin for a model.

    Args:
        fsdp2_plugin: A plugin of version 2.
        model: The model.

    Returns:
        A function that returns whether to shard a module; `None` if only the root is sharded.

    Raises:
        SettingsError: The model has no module of a class to wrap.
    """
    plugin = copy(fsdp2_plugin)
    plugin.fsdp_version = 2  # that of a run on XLA devices is ignored
    plugin.set_auto_wrap_policy(model)
    return cast("Any", plugin.auto_wrap_policy)


def blocks(
    model: nn.Module, policy: Callable[[nn.Module], bool] | None, ignored: set[int]
) -> list[nn.Module]:
    """Return the modules of a model to shard separately, bottom-up; the model itself comes last.

    Modules that are not separable are sharded with their parent.
    """
    if policy is None:
        return [model]
    is_separable = separable(model)
    inner = [
        module
        for module in dict.fromkeys(get_module_children_bottom_up(model))
        if module is not model
        and id(module) not in ignored
        and any(True for _ in module.parameters())
        and policy(module)
        and is_separable(module)
    ]
    return [*inner, model]


def separable_only(policy: Any, model: nn.Module) -> Any:
    """Restrict an FSDP1 policy to separable modules; a policy that is no function is returned unchanged."""
    if not inspect.isfunction(policy) and not isinstance(policy, partial):
        return policy
    is_separable = separable(model)

    def selects(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        selected = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        return selected and (recurse or is_separable(module))

    return selects


def separable(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a predicate: whether a module of a model can be sharded separately.

    It cannot if one of its parameters is also used outside of it, since a parameter belongs to one group; nor
    inside of `LEAVES`, which use its parameters without calling it; nor without a forward, like
    `ParameterDict`, which is never called.
    """
    counts = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    has_ties = any(count > 1 for count in counts.values())
    leaves = [part for part in model.modules() if isinstance(part, LEAVES)]
    uncalled = {id(part) for leaf in leaves for part in leaf.modules() if part is not leaf}

    def is_separable(module: nn.Module) -> bool:
        if id(module) in uncalled or not _has_forward(module):
            return False
        if not has_ties:
            return True
        inside = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        return all(counts[key] == count for key, count in inside.items())

    return is_separable


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


_LIBRARY = "transformer_engine"

FIRST_VERSION = "2.2"
"""Oldest usable version of TransformerEngine: earlier ones recompute outside of its autocast."""


def checkpoint_function(module: nn.Module) -> Callable[..., Any]:
    """Return torch's activation checkpointing function; for layers of TransformerEngine, that library's own.

    They have to be recomputed within its autocast and with the scales of the forward pass.
    """
    if not has_te_modules(module):
        return partial(checkpoint, use_reentrant=False)
    if compare_versions("transformer-engine", "<", FIRST_VERSION):
        raise UnsupportedError(
            "FullyShardedDataParallelPlugin(activation_checkpointing=True): TransformerEngine "
            f"{FIRST_VERSION} or newer is needed to recompute its layers in FP8. Upgrade it, or use the "
            "FP8 backend 'AO'."
        )

    def checkpoint_in_fp8(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # versions before 2.20 would store scales for a backward pass
            return function(*args, **kwargs)
        library = import_module(f"{_LIBRARY}.pytorch")
        return library.checkpoint(function, *args, use_reentrant=False, **kwargs)

    return checkpoint_in_fp8


def has_te_modules(module: nn.Module) -> bool:
    """Return whether a module has layers of TransformerEngine, without importing the library."""
    classes = {kind for part in module.modules() for kind in type(part).__mro__}
    return any(kind.__module__.partition(".")[0] == _LIBRARY for kind in classes)


def checkpoint_activations(module: nn.Module, *, recompute: bool = True, offload: bool = False) -> None:
    """Apply activation checkpointing to a module in place, without renaming or replacing modules.

    Its forward is replaced; a second call does nothing. `offload` moves saved tensors to the CPU, into pinned
    memory if there is an accelerator.
    """
    if "_checkpointed_forward" in vars(module):
        return
    recompute_later = checkpoint_function(module) if recompute else None
    vars(module)["_checkpointed_forward"] = module.forward

    def checkpointed(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = partial(forward, self)
        if recompute_later is not None:
            call = partial(recompute_later, call)
        # torch pins memory only if there is an accelerator.
        with save_on_cpu(pin_memory=True) if offload else nullcontext():
            return call(*args, **kwargs)

    wrap_forward(module, checkpointed)


def recomputed(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, units: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return the modules that recompute or offload activations, in the order of the model.

    They are every n-th of those that `activation_checkpointing_modules` selects, or of the `units`.

    Raises:
        SettingsError: A name selects nothing.
    """
    names = plugin.activation_checkpointing_modules
    selected = {id(unit) for unit in units}
    if names is not None:
        of_name = modules_by_pattern(names, model)
        if missing := [name for name, modules in of_name.items() if not modules]:
            known = {type(module).__name__ for module in model.modules()}
            hint = did_you_mean(missing[0], known, f"it has {', '.join(sorted(known))}.")
            raise SettingsError(
                f"activation_checkpointing_modules={names!r}: {type(model).__name__} has no module of a "
                f"class {missing[0]!r}, nor one whose full name it matches; {hint}"
            )
        selected = {id(module) for modules in of_name.values() for module in modules}
    in_order = [module for module in model.modules() if id(module) in selected]
    return in_order[:: plugin.activation_checkpointing_every]


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
    selected = modules_named(modules, model)
    return {parameter for module in selected for parameter in module.to(device).parameters()}


def modules_named(modules: Iterable[nn.Module] | str | None, model: nn.Module) -> list[nn.Module]:
    """Return the given modules, or those of a model whose full names match a regular expression."""
    if not isinstance(modules, str):
        return [*(modules or ())]
    pattern = re.compile(modules)
    selected = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    if not selected:
        raise SettingsError(
            f"ignored_modules={modules!r} matches no module name of {type(model).__name__}. "
            "model.named_modules() lists the names."
        )
    return selected


def modules_by_pattern(patterns: Iterable[str], model: nn.Module) -> dict[str, list[nn.Module]]:
    """Return the modules of a model by each pattern: one for full names, or the name of a class."""
    return {
        pattern: [
            module
            for name, module in model.named_modules()
            if type(module).__name__ == pattern or re.fullmatch(pattern, name)
        ]
        for pattern in patterns
    }


def compute_in_float32(module: nn.Module) -> None:
    """Let a module compute in float32 in place, also within autocast, whose operations cast its results.

    Without autocast, results are returned in the dtype of the first floating-point input.
    """

    def in_float32(forward: Callable[..., Any], self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inputs = [value for value in tree_leaves((args, kwargs)) if _is_floating(value)]
        if not inputs:
            return forward(self, *args, **kwargs)
        device = inputs[0].device.type
        returned = torch.float32 if torch.is_autocast_enabled(device) else inputs[0].dtype
        args, kwargs = _cast((args, kwargs), torch.float32)
        with torch.autocast(device, enabled=False):
            return _cast(forward(self, *args, **kwargs), returned)

    wrap_forward(module, in_float32)


def _is_floating(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda value: value.to(dtype) if _is_floating(value) else value, tree)


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], Any], model: nn.Module, device: torch.device | str
) -> Callable[[nn.Module], Any]:
    """Wrap a `param_init_fn` so that tied weights stay tied.

    Args:
        param_init_fn: Materialises one module; called module by module.
        model: The model, on the meta device.
        device: Device of the materialised parameters.

    Returns:
        A function that calls `param_init_fn` and then re-ties the module's tied weights.

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
    first = {name: group[0] for group in find_tied_parameters(model) for name in group}
    if not first:
        return param_init_fn
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    made: dict[str, nn.Parameter] = {}

    def init(module: nn.Module) -> Any:
        result = param_init_fn(module)
        for leaf, parameter in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            group = first.get(f"{prefixes.get(module)}{leaf}")
            if group is not None:
                if group not in made:
                    made[group] = nn.Parameter(parameter.to(device), parameter.requires_grad)
                setattr(module, leaf, made[group])
        return result

    return init
