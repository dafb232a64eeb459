"""The size of a model: its bytes by dtype, and its elements by block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from accel_bigmodel.layers import class_names
from accel_bigmodel.sizes import compute_module_sizes, get_max_layer_size
from accel_cli.commands.estimate.memory import Sizes
from accel_state.labels import CustomDtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from accel_bigmodel.sizes import ElementType

DTYPES: Mapping[str, ElementType] = {
    "float32": "float32",
    "float16": "float16",
    "int8": "int8",
    "int4": CustomDtype.INT4,
}
"""The dtypes of `--dtypes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The size of a model in one dtype, in bytes."""

    total: int
    largest: int
    layers: tuple[str, ...]


def weights_in(model: nn.Module, dtype: str) -> Weights:
    """Compute the bytes of a model's weights.

    Example:
        >>> weights_in(nn.Sequential(nn.Linear(4, 4, bias=False)), "int4")
        Weights(total=8, largest=8, layers=('0',))
    """
    sizes = compute_module_sizes(model, dtype=DTYPES[dtype])
    unsplit = sorted(class_names(getattr(model, "_no_split_modules", None)))
    largest, layers = get_max_layer_size(list(model.named_children()) or [("", model)], sizes, unsplit)
    return Weights(total=sizes[""], largest=largest, layers=tuple(layers))


def sizes_of(model: nn.Module) -> Sizes:
    """Count a model's elements.

    Example:
        >>> sizes_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        Sizes(parameters=40, trainable=40, blocks=(), largest=16, buffers=0)
    """
    trainable = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return Sizes(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(trainable),
        blocks=tuple(sum(one.numel() for one in block.parameters()) for block in blocks_of(model)),
        largest=max(trainable, default=0),
        buffers=sum(buffer.nbytes for buffer in model.buffers()),
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Find the blocks that FSDP gathers one by one.

    They are the modules of `_no_split_modules` if the model has that; else the items of its lists.
    """
    unsplit = class_names(getattr(model, "_no_split_modules", None))
    named = [module for module in model.modules() if type(module).__name__ in unsplit]
    if named:
        return _outermost(named)
    lists = [module for module in model.modules() if _is_list(module)]
    return _outermost([item for one in lists for item in one.children()])


def _is_list(module: nn.Module) -> bool:
    """Whether a module is a list of layers; one made from names of weights has numbered children."""
    names = [name for name, _ in module.named_children()]
    if isinstance(module, nn.Sequential) or len(names) < 2:
        return False
    return isinstance(module, nn.ModuleList) or all(name.isdigit() for name in names)


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return the modules that are inside no other one."""
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]
