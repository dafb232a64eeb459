"""Names of an optimizer's parameters, from the weights that were saved with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_convert.contents import OptimizerContents
from accel_ops.weights.lazy_tensors import LazyTensor


def name_parameters(
    states: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LazyTensor],
    *,
    in_order: bool,
) -> OptimizerContents:
    """Name the parameters of an optimizer state that is keyed by numbers.

    An optimizer built with `named_parameters()` has the names. Otherwise a group's parameters are matched to
    all weights of its shapes, in the order of the model; numbers and shapes must fit exactly.

    Args:
        states: The states of each parameter, by number.
        groups: The parameter groups.
        weights: The weights of the model.
        in_order: Whether the weights are in the order of the model.

    Returns:
        The state by name, or by number with the reason.
    """
    names = _saved_names(groups)
    reason = ""
    if names is None:
        names, reason = _names_by_shape(states, groups, weights) if in_order else (None, _NO_ORDER)
    if names is None:
        return OptimizerContents(states=states, groups=groups, unnamed=reason)
    name_of = {
        number: name
        for group, of_group in zip(groups, names, strict=True)
        for number, name in zip(group["params"], of_group, strict=True)
    }
    return OptimizerContents(
        states={name_of[number]: values for number, values in states.items() if number in name_of},
        groups=[{**group, "params": of_group} for group, of_group in zip(groups, names, strict=True)],
    )


_NO_ORDER = "its file numbers the parameters, but the weights file has a different order"


def _saved_names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    names = [list(group.get("param_names", ())) for group in groups]
    fits = all(len(row) == len(group["params"]) for row, group in zip(names, groups, strict=True))
    return names if fits and groups else None


def _names_by_shape(
    states: Mapping[Any, Mapping[str, Any]],
    groups: Sequence[Mapping[str, Any]],
    weights: Mapping[str, LazyTensor],
) -> tuple[list[list[str]] | None, str]:
    names: list[list[str]] = []
    seen: set[tuple[int, ...]] = set()
    for number, group in enumerate(groups):
        shapes = [_shape_of(states.get(parameter, {})) for parameter in group["params"]]
        if None in shapes:
            return None, "its file numbers the parameters, but some have no state with a shape"
        known = {shape for shape in shapes if shape is not None}
        fitting = {
            name: lazy
            for name, lazy in weights.items()
            if lazy.shape in known and lazy.dtype.is_floating_point
        }
        in_order = [lazy.shape for lazy in fitting.values()] == shapes
        if known & seen or not in_order or len({lazy.dtype for lazy in fitting.values()}) > 1:
            return None, (
                f"its file numbers the parameters, but those of group {number} do not match the weights "
                "in the order of the model"
            )
        seen |= known
        names.append([*fitting])
    return names, ""


def _shape_of(values: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the shape of a parameter: the shape that all of its states with dims have."""
    shapes = {value.shape for value in values.values() if isinstance(value, LazyTensor) and value.shape}
    return shapes.pop() if len(shapes) == 1 else None
