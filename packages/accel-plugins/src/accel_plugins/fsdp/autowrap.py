"""Wrap policies: select the modules to shard by class, by size, or by a function of the user's."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

POLICIES: tuple[str, ...] = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
"""The names of the built-in wrap policies."""


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

    Call it bottom-up, as `fully_shard` is applied. It never selects `ModuleList` and `ModuleDict`, which have
    no forward.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._wrapped: set[int] = set()

    def __call__(self, module: nn.Module) -> bool:
        """Return whether to shard the module separately."""
        sizes = {id(one): one.numel() for one in module.parameters() if id(one) not in self._wrapped}
        if sum(sizes.values()) < max(self.least, 1) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
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

    A module that is tied to one outside of it is not among them: a parameter belongs to one FSDP group.
    """
    if policy is None:
        return [model]
    shared = _shared_outside(model)
    inner = [
        module
        for module in reversed([*model.modules()])
        if module is not model
        and id(module) not in ignored
        and any(True for _ in module.parameters())
        and policy(module)
        and not shared(module)
    ]
    return [*inner, model]


def _shared_outside(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Return a function: whether a module has a parameter tied to one outside of it."""
    owners: dict[int, int] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    tied = {key for key, count in owners.items() if count > 1}
    if not tied:
        return lambda _: False

    def outside(module: nn.Module) -> bool:
        inside: dict[int, int] = {}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                if id(parameter) in tied:
                    inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        return any(owners[key] != count for key, count in inside.items())

    return outside
