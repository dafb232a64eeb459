"""Layers whose parameters stage 3 gathers together."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from accel_plugins.deepspeed.library import load_library, part
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from torch import nn


def find_classes(model: nn.Module, names: str) -> list[type[nn.Module]]:
    """Find the classes of a model's modules by their names.

    Args:
        model: The model.
        names: Names of classes, with commas between.

    Raises:
        SettingsError: The model has no module of some class; the nearest name is given.

    Example:
        >>> import torch
        >>> find_classes(torch.nn.Sequential(torch.nn.Linear(1, 1)), "Linear")
        [<class 'torch.nn.modules.linear.Linear'>]
    """
    classes = {type(module).__name__: type(module) for module in model.modules()}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in classes:
            near = get_close_matches(name, classes, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(sorted(classes))}."
            raise SettingsError(
                f"DeepSpeedPlugin(transformer_moe_cls_names={names!r}): {type(model).__name__} has no "
                f"module of the class {name!r}{hint}"
            )
    return [classes[name] for name in wanted]


def mark_leaf_modules(model: nn.Module, names: str) -> None:
    """Let every module of some classes gather its parameters, and those of the modules in it, together.

    Args:
        model: The model.
        names: Names of classes, with commas between.

    Raises:
        SettingsError: The model has no module of some class.
        MissingDependencyError: DeepSpeed is not installed.
    """
    classes = find_classes(model, names)
    load_library("transformer_moe_cls_names")
    part("utils").set_z3_leaf_modules(model, classes)
