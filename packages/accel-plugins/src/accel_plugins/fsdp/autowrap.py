"""Which modules are sharded on their own: policies by class, by size, or by what the user says."""

from __future__ import annotations

import functools
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin

POLICIES: tuple[str, ...] = ("transformer_based_wrap", "size_based_wrap", "no_wrap")
"""The policies that have names."""


def classes_named(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """Find classes of modules by their names.

    Args:
        model: In which they are looked for.
        names: Their names; if `None`, those in the model's `_no_split_modules`.

    Raises:
        SettingsError: One does not occur, or there are no names at all.

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
            f"auto_wrap_policy='transformer_based_wrap': {type(model).__name__} does not say in "
            "_no_split_modules what its blocks are; name their classes in transformer_cls_names_to_wrap."
        )
    classes = {type(module).__name__: type(module) for module in model.modules()}
    missing = [name for name in wanted if name not in classes]
    if missing and not declared:
        near = get_close_matches(missing[0], classes, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(classes))}."
        raise SettingsError(
            f"transformer_cls_names_to_wrap={wanted!r}: {type(model).__name__} has no module of a class "
            f"{missing[0]!r}; {hint}"
        )
    found = {classes[name] for name in wanted if name in classes}
    if not found:
        raise SettingsError(
            f"auto_wrap_policy='transformer_based_wrap': none of the classes {wanted}, which "
            f"{type(model).__name__} names in _no_split_modules, occurs in it; name those that do in "
            "transformer_cls_names_to_wrap."
        )
    return found


def transformer_policy(classes: set[type[nn.Module]], version: int) -> Callable[..., Any]:
    """A policy that chooses modules of some classes, as a version of FSDP asks for it."""
    if version == 1:
        return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
    kinds = tuple(classes)
    return lambda module: isinstance(module, kinds)


def size_policy(least: int, version: int) -> Callable[..., Any]:
    """A policy that chooses modules with so many parameters that belong to no chosen module in them."""
    if version == 1:
        return functools.partial(size_based_auto_wrap_policy, min_num_params=least)
    return SizePolicy(least)


class SizePolicy:
    """Chooses modules by how many parameters they have that no chosen module in them has.

    Asked bottom-up, as `fully_shard` is applied. Containers, which are never called, are not chosen.

    Args:
        least: The number of parameters.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._wrapped: set[int] = set()

    def __call__(self, module: nn.Module) -> bool:
        """Whether the module is sharded on its own."""
        sizes = {id(one): one.numel() for one in module.parameters() if id(one) not in self._wrapped}
        if sum(sizes.values()) < max(self.least, 1) or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            return False
        self._wrapped |= sizes.keys()
        return True


def fsdp2_prepare_auto_wrap_policy(
    fsdp2_plugin: FullyShardedDataParallelPlugin, model: nn.Module
) -> Callable[[nn.Module], bool] | None:
    """The function that says of a module of a model whether `fully_shard` is applied to it.

    Args:
        fsdp2_plugin: Of version 2.
        model: The whole.

    Returns:
        A function of a module; `None` if only the whole is sharded.

    Raises:
        SettingsError: A class that is to be wrapped does not occur in the model.
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
    """The modules of a model that are sharded on their own, inner ones first, the model last.

    A module that shares a parameter with what is around it is left to that: a parameter has one owner.

    Args:
        model: The whole.
        policy: What chooses; `None` chooses nothing.
        ignored: The ids of modules that are not sharded at all.
    """
    if policy is None:
        return [model]
    shared = _shared_outside(model)
    inner = [
        module
        for module in _bottom_up(model)
        if module is not model
        and id(module) not in ignored
        and any(True for _ in module.parameters())
        and policy(module)
        and not shared(module)
    ]
    return [*inner, model]


def _bottom_up(module: nn.Module) -> list[nn.Module]:
    return [*reversed([*module.modules()])]


def _never(module: nn.Module) -> bool:
    del module
    return False


def _shared_outside(model: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module has a parameter that a module outside of it has, too."""
    owners: dict[int, int] = {}
    for part in model.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    tied = {key for key, count in owners.items() if count > 1}
    if not tied:
        return _never

    def outside(module: nn.Module) -> bool:
        inside: dict[int, int] = {}
        for part in module.modules():
            for parameter in part.parameters(recurse=False):
                if id(parameter) in tied:
                    inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        return any(owners[key] != count for key, count in inside.items())

    return outside
