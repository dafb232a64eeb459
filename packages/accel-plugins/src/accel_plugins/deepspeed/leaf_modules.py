"""Leaf modules of ZeRO stage 3, whose parameters are gathered together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.deepspeed.library import ds_module, load_library
from accel_state.did_you_mean import did_you_mean
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from torch import nn


def find_classes(model: nn.Module, names: str) -> list[type[nn.Module]]:
    """Find the classes of a model's modules by name.

    Args:
        model: The model.
        names: Names of classes, separated by commas.

    Raises:
        SettingsError: The model has no module of a class.

    Example:
        >>> import torch
        >>> find_classes(torch.nn.Sequential(torch.nn.Linear(1, 1)), "Linear")
        [<class 'torch.nn.modules.linear.Linear'>]
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in classes:
            hint = did_you_mean(name, classes, f"it has {', '.join(sorted(classes))}.")
            raise SettingsError(
                f"DeepSpeedPlugin(transformer_moe_cls_names={names!r}): {type(model).__name__} has no "
                f"module of the class {name!r}; {hint}"
            )
    return [classes[name] for name in wanted]


def mark_leaf_modules(model: nn.Module, names: str) -> None:
    """Mark modules of given classes as leaf modules: their parameters are gathered with their submodules'.

    Args:
        model: The model.
        names: Names of classes, separated by commas.

    Raises:
        SettingsError: The model has no module of a class.
        MissingDependencyError: DeepSpeed is not installed.
    """
    classes = find_classes(model, names)
    load_library("transformer_moe_cls_names")
    ds_module("utils").set_z3_leaf_modules(model, classes)
