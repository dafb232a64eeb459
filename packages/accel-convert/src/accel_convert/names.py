"""The parameters of an optimizer by name, from its state or the weights that were saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_convert.contents import OptimizerContents
from accel_ops.weights.lazy_tensors import LazyTensor


def name_parameters(
    state: Mapping[str, Any], weights: Mapping[str, LazyTensor], *, in_order: bool = True
) -> OptimizerContents:
    """Return an optimizer's state by name, or by number with the reason.

    An optimizer built with `named_parameters()` has the names. Otherwise a group's parameters are matched to
    all weights of its shapes, in the order of the model; numbers and shapes must fit exactly.

    Args:
        state: A state dict, by number, or by name as FSDP has it.
        weights: The weights of the model.
        in_order: Whether the weights are in the order of the model.
    """
    states, groups = state.get("state", {}), state.get("param_groups", [])
    if all(isinstance(name, str) for group in groups for name in group["params"]):
        return OptimizerContents(states=states, groups=groups)
    names = [list(group.get("param_names", ())) for group in groups]
    if any(len(row) != len(group["params"]) for row, group in zip(names, groups, strict=True)):
        if not in_order:
            reason = "its file numbers the parameters, but the weights file has a different order"
            return OptimizerContents(states=states, groups=groups, unnamed=reason)
        try:
            names = _names_by_shape(states, groups, weights)
        except ValueError as error:
            reason = f"its file numbers the parameters, but {error}"
            return OptimizerContents(states=states, groups=groups, unnamed=reason)
    name_of: dict[Any, str] = {}
    for group, row in zip(groups, names, strict=True):
        name_of |= zip(group["params"], row, strict=True)
    return OptimizerContents(
        states={name_of[number]: values for number, values in states.items() if number in name_of},
        groups=[{**group, "params": row} for group, row in zip(groups, names, strict=True)],
    )


def _names_by_shape(
    states: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LazyTensor],
) -> list[list[str]]:
    names: list[list[str]] = []
    seen: set[tuple[int, ...]] = set()
    for number, group in enumerate(groups):
        shapes: list[tuple[int, ...]] = []
        for parameter in group["params"]:
            values = states.get(parameter, {}).values()
            of_states = {value.shape for value in values if isinstance(value, LazyTensor) and value.shape}
            if len(of_states) != 1:
                raise ValueError("some have no state with a shape")
            shapes += of_states
        fitting = {
            name: lazy
            for name, lazy in weights.items()
            if lazy.shape in shapes and lazy.dtype.is_floating_point
        }
        is_same = [lazy.shape for lazy in fitting.values()] == shapes
        if not seen.isdisjoint(shapes) or not is_same or len({lazy.dtype for lazy in fitting.values()}) > 1:
            raise ValueError(f"those of group {number} do not match the weights in the order of the model")
        seen.update(shapes)
        names.append([*fitting])
    return names
