"""Wrap policies: select the modules to shard by class, by size, or by a function of the user's."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

POLICIES: tuple[str, ...] = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
"""The names of the built-in wrap policies."""

LEAVES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that use parameters of submodules without calling them, always or in their fast path."""


def classes_named(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """Find a model's module classes by name; without names, those in the model's `_no_split_modules`.

    Example:
        >>> classes_named(nn.Sequential(nn.Linear(1, 1)), ["Linear"])
        {<class 'torch.nn.modules.linear.Linear'>}
    """
    wanted = [*(names or ())]
    declared = not wanted
    if declared:
        wanted = sorted(
            {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
        )
    if not wanted:
        raise SettingsError(
            f"auto_wrap_policy='transformer_based_wrap': {type(model).__name__} has no _no_split_modules "
            "with the classes of its blocks; name them in transformer_cls_names_to_wrap."
        )
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wanted if name not in classes]
    if missing and not declared:
        hint = did_you_mean(missing[0], classes, f"it has {', '.join(sorted(classes))}.")
        raise SettingsError(
            f"transformer_cls_names_to_wrap={wanted!r}: {type(model).__name__} has no module of a class "
            f"{missing[0]!r}; {hint}"
        )
    found = {classes[name] for name in wanted if name in classes}
    if not found:
        raise SettingsError(
            f"auto_wrap_policy='transformer_based_wrap': {type(model).__name__} has no module of the classes "
            f"{wanted} of its _no_split_modules; name the classes of its blocks in "
            "transformer_cls_names_to_wrap."
        )
    return found


def transformer_policy(classes: set[type[nn.Module]], version: int) -> Callable[..., Any]:
    """Return a wrap policy that selects modules of given classes, for FSDP version 1 or 2."""
    if version == 1:
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    kinds = tuple(classes)
    return lambda module: isinstance(module, kinds)


def size_policy(least: int, version: int) -> Callable[..., Any]:
    """Return a wrap policy that selects modules by their number of parameters, for FSDP version 1 or 2."""
    if version == 1:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    return SizePolicy(least)


class SizePolicy:
    """Wrap policy that selects modules by the number of their parameters outside of selected submodules.

    Call it bottom-up, as `fully_shard` is applied. It never selects modules without a forward, such as
    `ModuleList`.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._wrapped: set[int] = set()

    def __call__(self, module: nn.Module) -> bool:
        """Return whether to shard the module separately."""
        sizes = {id(one): one.numel() for one in module.parameters() if id(one) not in self._wrapped}
        if sum(sizes.values()) < max(self.least, 1) or not _has_forward(module):
            return False
        self._wrapped |= sizes.keys()
        return True


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
    policy = fsdp2_plugin.block_policy
    if policy == "transformer_based_wrap":
        return transformer_policy(classes_named(model, fsdp2_plugin.transformer_cls_names_to_wrap), 2)
    if policy == "size_based_wrap":
        return size_policy(fsdp2_plugin.min_num_params or 0, 2)
    return policy if callable(policy) else None


def blocks(
    model: nn.Module, policy: Callable[[nn.Module], bool] | None, ignored: set[int]
) -> list[nn.Module]:
    """Return the modules of a model to shard separately, bottom-up; the model is the last.

    Modules that are not separable are left to what is around.
    """
    if policy is None:
        return [model]
    is_separable = separable(model)
    inner = [
        module
        for module in _bottom_up(model, set())
        if module is not model
        and id(module) not in ignored
        and any(True for _ in module.parameters())
        and policy(module)
        and is_separable(module)
    ]
    return [*inner, model]


def _bottom_up(module: nn.Module, visited: set[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once, after all inside of it, also those that have several parents."""
    visited.add(module)
    for child in module.children():
        if child not in visited:
            yield from _bottom_up(child, visited)
    yield module


def separable_only(policy: Any, model: nn.Module) -> Any:
    """Return a policy of FSDP1 that selects separable modules only; as it is if it is no function."""
    if not inspect.isfunction(policy) and not isinstance(policy, functools.partial):
        return policy
    is_separable = separable(model)

    def selects(*, module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        selected = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        return selected and (recurse or is_separable(module))

    return selects


def separable(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a function: whether a module of a model can be sharded on its own.

    It cannot if one of its parameters has a name in the model that is outside of it, since a parameter
    belongs to one group; nor inside of `LEAVES`, which use its parameters without calling it; nor without a
    forward, as `ParameterDict`, since nobody calls it.
    """
    counts = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    has_ties = any(count > 1 for count in counts.values())
    leaves = [part for part in model.modules() if isinstance(part, LEAVES)]
    uncalled = {id(part) for leaf in leaves for part in leaf.modules() if part is not leaf}

    def is_separable(module: nn.Module) -> bool:
        if id(module) in uncalled or not _has_forward(module):
            return False
        if not has_ties:
            return True
        inside = Counter(id(one) for _, one in module.named_parameters(remove_duplicate=False))
        return all(counts[key] == count for key, count in inside.items())

    return is_separable


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward
