"""A device map without entries inside entries."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from accel_ops.weights.tensors import buffer_table, child_table, parameter_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

T = TypeVar("T")


def flatten_map(model: nn.Module, device_map: Mapping[str, T]) -> dict[str, T]:
    """Replace entries that have others below them by entries for what is left of them.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> flatten_map(model, {"": 0, "1.bias": "cpu"})
        {'0': 0, '1.weight': 0, '1.bias': 'cpu'}
    """
    above = {prefix for name in device_map if name for prefix in _parents(name)}
    flat: dict[str, T] = {}

    def visit(module: nn.Module, name: str, inherited: T | None) -> None:
        target = device_map.get(name, inherited)
        if name not in above:
            if target is not None:
                flat[name] = target
            return
        prefix = f"{name}." if name else ""
        for leaf, tensor in (*parameter_table(module).items(), *buffer_table(module).items()):
            device = device_map.get(prefix + leaf, target)
            if device is not None and tensor is not None:
                flat[prefix + leaf] = device
        for leaf, child in child_table(module).items():
            if child is not None:
                visit(child, prefix + leaf, target)

    visit(model, "", None)
    return flat


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]
