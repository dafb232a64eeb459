"""Which values trackers get: configurations as plain data, tensors as numbers or histograms."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import logging
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, TypeAlias, cast

import numpy as np
import torch

logger = logging.getLogger(__name__)

Number: TypeAlias = int | float

ARRAYS = (torch.Tensor, np.ndarray, np.generic)
"""Types of what has elements, a shape and a dtype. A tuple, since a union is made anew at every call."""

PLAIN = frozenset({bool, int, float, str})
"""Types of values that are logged as they are: what `type(value) in PLAIN` says needs no further look."""

NUMBERS = frozenset({bool, int, float})
"""Those of `PLAIN` that are numbers."""

_MOST_ELEMENTS = 32
"""Tensors with more elements are described by shape and dtype in a configuration."""


def to_plain(value: Any) -> Any:
    """Copy a value of a configuration as plain data.

    Numbers, texts, booleans and `None` stay. Mappings, dataclasses and argparse namespaces become
    dictionaries with texts as keys; lists, tuples and sets become lists. An enumeration's member becomes its
    value. Tensors and arrays become numbers or lists, beyond 32 elements a description. Everything else,
    such as a path, a dtype or a class, becomes its `str`.

    Example:
        >>> import torch
        >>> from pathlib import PurePosixPath
        >>> to_plain({"data": PurePosixPath("a/b"), 3: (1, torch.tensor(2.5)), "dtype": torch.float16})
        {'data': 'a/b', '3': [1, 2.5], 'dtype': 'torch.float16'}
    """
    for kinds, convert in _CONVERSIONS:
        if isinstance(value, kinds):
            return convert(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return str(value)


def _built_in(value: Any) -> Any:
    """Without subclasses: libraries compare types, or write their `repr`."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return value


def _array(value: Any) -> Any:
    count = value.numel() if isinstance(value, torch.Tensor) else value.size
    if count > _MOST_ELEMENTS or (isinstance(value, torch.Tensor) and value.is_meta):
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
    return to_plain(value.tolist())


def _class_name(value: type) -> str:
    return f"{value.__module__}.{value.__qualname__}"


_CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, lambda value: to_plain(value.value)),
    ((NoneType, bool, int, float, str), _built_in),
    (Mapping, lambda value: {str(key): to_plain(inner) for key, inner in value.items()}),
    (argparse.Namespace, lambda value: to_plain(vars(value))),
    ((list, tuple), lambda value: [to_plain(inner) for inner in value]),
    ((set, frozenset), lambda value: sorted((to_plain(inner) for inner in value), key=str)),
    (ARRAYS, _array),
    (type, _class_name),
)
"""Kinds of values and how they become plain, the first that fits."""


def to_flat(config: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """Copy a configuration as plain data in one level.

    As `to_plain`; then the keys of dictionaries in dictionaries are joined with dots, and lists are written
    as texts.

    Example:
        >>> to_flat({"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "seed": 3})
        {'optimizer.lr': 0.1, 'optimizer.betas': '[0.9, 0.99]', 'seed': 3}
    """
    return {
        name: str(value) if isinstance(value, list) else value
        for name, value in join_keys(to_plain(config)).items()
    }


def join_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy nested dictionaries into one level, keys joined with dots.

    Example:
        >>> join_keys({"loss": {"train": 1, "test": 2}, "lr": 3})
        {'loss.train': 1, 'loss.test': 2, 'lr': 3}
    """
    # Most calls have no dictionary inside: a copy in C is then all there is to do.
    for key, value in values.items():
        if type(key) is not str or (type(value) not in PLAIN and isinstance(value, Mapping)):
            return _joined(values, "")
    return dict(values)


def _joined(values: Mapping[Any, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _joined(cast("Mapping[Any, Any]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def to_number(value: Any) -> Any:
    """Convert tensors and arrays with one element to numbers; leave everything else.

    Example:
        >>> import torch
        >>> to_number(torch.tensor([0.5])), to_number("a")
        (0.5, 'a')
    """
    if not isinstance(value, ARRAYS):
        return value
    try:
        return value.item()
    except (RuntimeError, ValueError):  # it has several elements or none, or is a meta tensor
        return value


def separate_vectors(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split off tensors and arrays that are no single number; those with one element become numbers.

    Returns:
        The values without them, and them with the keys of inner dictionaries joined by dots.

    Example:
        >>> separate_vectors({"loss": np.float32(0.5), "a": {"grads": np.zeros(2), "lr": 3}})
        ({'loss': 0.5, 'a': {'lr': 3}}, {'a.grads': array([0., 0.])})
    """
    scalars, vectors = dict(values), dict[str, Any]()
    for name, value in values.items():
        if type(value) in PLAIN:
            continue
        if isinstance(value, ARRAYS):
            scalars[name] = number = to_number(value)
            if number is value:
                vectors[name] = scalars.pop(name)
        elif isinstance(value, Mapping):
            scalars[name], inner = separate_vectors(cast("Mapping[str, Any]", value))
            vectors |= {f"{name}.{key}": vector for key, vector in inner.items()}
    return scalars, vectors


def split(
    tracker: str, values: Mapping[str, Any]
) -> tuple[dict[str, Number], dict[str, str], dict[str, Any]]:
    """Split values into numbers, texts and vectors, with the keys of inner dictionaries joined by dots.

    What is none of them is skipped with one warning.

    Example:
        >>> split("mlflow", {"loss": {"train": 0.5}, "note": "better", "step": np.int64(3)})
        ({'loss.train': 0.5, 'step': 3}, {'note': 'better'}, {})
    """
    numbers: dict[str, Number] = {}
    texts: dict[str, str] = {}
    scalars, vectors = separate_vectors(join_keys(values))
    for name, value in scalars.items():
        if type(value) in NUMBERS or isinstance(value, int | float):
            numbers[name] = value
        elif isinstance(value, str):
            texts[name] = value
        else:
            warn_skipped(tracker, name, value)
    return numbers, texts, vectors


def to_finite(vector: Any) -> np.ndarray[Any, Any]:
    """Convert a tensor or array to a flat array of its finite elements; empty if they cannot be read.

    Example:
        >>> to_finite(torch.tensor([[1, float("nan")], [float("inf"), 4]])), to_finite(torch.tensor([1j, 2]))
        (array([1., 4.]), array([], dtype=float64))
    """
    if isinstance(vector, torch.Tensor):
        is_real = not (vector.is_meta or vector.is_complex())
        vector = vector.detach().cpu().double().numpy() if is_real else np.empty(0)
    array = np.asarray(vector)
    array = array.astype(np.float64).reshape(-1) if array.dtype.kind in "biuf" else np.empty(0)
    return array[np.isfinite(array)]


def warn_skipped(tracker: str, name: str, value: Any) -> None:
    """Warn, once for each tracker and name, that a value is not logged."""
    if (tracker, name) in _skipped:
        return
    _skipped.add((tracker, name))
    what = "None" if value is None else f"a {_class_name(type(value))}"
    if isinstance(value, ARRAYS):
        what += f" of shape {tuple(value.shape)} and dtype {value.dtype}"
    logger.warning("The tracker %r cannot log %r, which is %s: it is skipped.", tracker, name, what)


_skipped: set[tuple[str, str]] = set()
"""Trackers and names that `warn_skipped` has warned about."""
