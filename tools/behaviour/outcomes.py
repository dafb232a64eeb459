"""What a program found, as plain data that two processes can compare."""

from __future__ import annotations

import builtins
import dataclasses
import enum
from collections.abc import Mapping
from math import isfinite
from pathlib import PurePath
from typing import Any

import torch

DIGITS = 5


def outcome_of(value: Any) -> Any:
    """Turn a result into plain data: tensors with type and values, floats rounded, other objects by type."""
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, enum.Enum) else value
    for kind, convert in _CONVERSIONS:
        if isinstance(value, kind):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"is": type(value).__name__, **outcome_of(fields)}
    return f"<{value.__name__ if isinstance(value, type) else type(value).__name__}>"


def failure_of(error: BaseException) -> dict[str, str]:
    """Turn an exception into the name by which a script would catch it: its nearest built-in class."""
    name = next(kind.__name__ for kind in type(error).__mro__ if hasattr(builtins, kind.__name__))
    return {"raises": name, "message": str(error)[:300]}


def _float(value: float) -> Any:
    return round(value, DIGITS) if isfinite(value) else str(value)


def _tensor(value: torch.Tensor) -> dict[str, Any]:
    plain = value.detach().cpu()
    plain = plain.float() if plain.is_floating_point() else plain
    return {"tensor": str(value.dtype).removeprefix("torch."), "values": outcome_of(plain.tolist())}


def _mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(outcome_of(key)): outcome_of(one) for key, one in value.items()}


def _tuple(value: tuple[Any, ...]) -> dict[str, Any]:
    kind = "tuple" if type(value) is tuple else type(value).__name__
    return {kind: [outcome_of(one) for one in value]}


_CONVERSIONS: tuple[tuple[Any, Any], ...] = (
    (float, _float),
    (torch.Tensor, _tensor),
    ((torch.dtype, torch.device, PurePath), str),
    (enum.Enum, lambda value: outcome_of(value.value)),
    (Mapping, _mapping),
    (tuple, _tuple),
    (list, lambda value: [outcome_of(one) for one in value]),
    ((set, frozenset), lambda value: sorted(map(str, value))),
)
