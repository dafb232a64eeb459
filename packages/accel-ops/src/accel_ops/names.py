"""Parts of objects by name, and names of objects."""

from __future__ import annotations

import sys
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, overload

from accel_ops.modules import extract_model_from_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, MutableMapping

    from torch import nn


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted name.

    Raises:
        AttributeError: One of them does not exist.

    Example:
        >>> import torch
        >>> recursive_getattr(torch.nn.Sequential(torch.nn.Linear(1, 2)), "0.out_features")
        2
    """
    return attrgetter(attr)(obj)


def get_pretty_name(obj: Any) -> str:
    """Return the name of an object: its own, else that of its class.

    Example:
        >>> get_pretty_name(dict.get), get_pretty_name({})
        ('dict.get', 'dict')
    """
    for attribute in ("__qualname__", "__name__"):
        name = getattr(obj, attribute, None)
        if isinstance(name, str):
            return name
    return type(obj).__qualname__


def merge_dicts(source: Mapping[Any, Any], destination: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    """Merge one mapping into another, in place; mappings in both are merged recursively.

    Args:
        source: The mapping whose entries take precedence.
        destination: The mapping that is changed.

    Example:
        >>> merge_dicts({"a": {"y": 2}, "b": 3}, {"a": {"x": 1}})
        {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            inside = destination.get(key)
            destination[key] = merge_dicts(value, inside if isinstance(inside, dict) else {})
        else:
            destination[key] = value
    return destination


@overload
def get_module_children_bottom_up(model: nn.Module, return_fqns: Literal[False] = ...) -> list[nn.Module]: ...
@overload
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: Literal[True]
) -> list[tuple[str, nn.Module]]: ...
def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """List all modules of a model, children before their parents, the model itself last.

    Args:
        model: The model. A module that is used in two places comes twice.
        return_fqns: Return pairs of a module's full name, `""` for the model, and the module.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Tanh())
        >>> [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
        ['0.0', '0', '1', '']
    """
    named = list(_bottom_up(model, ""))
    return named if return_fqns else [module for _, module in named]


def is_peft_model(model: nn.Module) -> bool:
    """Return whether a model is one of the library `peft`, also in a distributed wrapper.

    Example:
        >>> import torch
        >>> is_peft_model(torch.nn.Linear(1, 1))
        False
    """
    peft = sys.modules.get("peft")  # nobody has made one without importing it
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )


def _bottom_up(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child_name, child in module.named_children():
        yield from _bottom_up(child, f"{name}.{child_name}" if name else child_name)
    yield name, module
