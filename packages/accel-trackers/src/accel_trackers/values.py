"""Values of trackers as plain data: configurations, numbers, images, tensors on their way to the host."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from accel_state.errors import UnsupportedError
from accel_state.streams import DeviceStreams, device_streams

logger = logging.getLogger(__name__)

Number: TypeAlias = int | float

ARRAYS = (torch.Tensor, np.ndarray, np.generic)
"""Types of what has elements, a shape and a dtype. A tuple, since a union is made anew at every call."""

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
    """Convert subclasses of built-in types: libraries compare types, or write their `repr`."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if type(value) is kind else kind(value)
    return value


def _array(value: Any) -> Any:
    count = value.numel() if isinstance(value, torch.Tensor) else value.size
    if count > _MOST_ELEMENTS or (isinstance(value, torch.Tensor) and value.is_meta):
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype})"
    return to_plain(value.tolist())


_CONVERSIONS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (enum.Enum, lambda value: to_plain(value.value)),
    ((NoneType, bool, int, float, str), _built_in),
    (Mapping, lambda value: {str(key): to_plain(inner) for key, inner in value.items()}),
    (argparse.Namespace, lambda value: to_plain(vars(value))),
    ((list, tuple), lambda value: [to_plain(inner) for inner in value]),
    ((set, frozenset), lambda value: sorted((to_plain(inner) for inner in value), key=str)),
    (ARRAYS, _array),
    (type, lambda value: f"{value.__module__}.{value.__qualname__}"),
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
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            inner = join_keys(cast("Mapping[str, Any]", value))
            flat |= {f"{key}.{name}": inner_value for name, inner_value in inner.items()}
        else:
            flat[str(key)] = value
    return flat


def to_number(value: Any) -> Any:
    """Convert tensors and arrays with one element to numbers; keep everything else.

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
        if isinstance(value, int | float):
            numbers[name] = value
        elif isinstance(value, str):
            texts[name] = value
        else:
            warn_skipped(tracker, name, value)
    return numbers, texts, vectors


def to_finite(vector: Any) -> np.ndarray[Any, Any]:
    """Convert numbers of any shape to a flat array of the finite ones; empty if they cannot be read.

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
    what = "None" if value is None else f"a {to_plain(type(value))}"
    if isinstance(value, ARRAYS):
        what += f" of shape {tuple(value.shape)} and dtype {value.dtype}"
    logger.warning("The tracker %r cannot log %r, which is %s: it is skipped.", tracker, name, what)


_skipped: set[tuple[str, str]] = set()
"""Trackers and names that `warn_skipped` has warned about."""


_CHANNELS = (1, 3, 4)


def to_images(name: str, value: Any, dataformats: str | None = None) -> list[np.ndarray[Any, Any]]:
    """Convert images to a list of arrays of shape (H, W, C) and dtype uint8, C being 1, 3 or 4.

    The values are those of `GeneralTracker.log_images`, and `dataformats` their axes, such as `"NCHW"`; if
    `None`, the channels are last if the last axis has 1, 3 or 4 elements, and first otherwise.

    Example:
        >>> [image.shape for image in to_images("samples", torch.zeros(2, 3, 5, 7))]
        [(5, 7, 3), (5, 7, 3)]
    """
    if isinstance(value, list | tuple):
        return [image for image_or_batch in value for image in to_images(name, image_or_batch, dataformats)]
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    pil = sys.modules.get("PIL.Image")
    if pil is not None and isinstance(value, pil.Image) and value.mode not in ("1", "L", "RGB", "RGBA"):
        value = value.convert("RGBA" if value.has_transparency_data else "RGB")
    array = np.asarray(value)
    axes = dataformats
    if axes is None and 2 <= array.ndim <= 4:
        batch = "N" if array.ndim == 4 else ""
        axes = "HW" if array.ndim == 2 else f"{batch}HWC" if array.shape[-1] in _CHANNELS else f"{batch}CHW"
    is_known = axes is not None and len(axes) == array.ndim and not set(axes) - set("NHWC")
    if axes is None or not is_known or ("C" in axes and array.shape[axes.index("C")] not in _CHANNELS):
        raise UnsupportedError(
            f"log_images() got {name!r} of shape {array.shape} with dataformats={dataformats!r}: expected "
            "(H, W), (H, W, C), (C, H, W) or a batch of these, with 1, 3 or 4 channels."
        )
    for missing in {*"CN"} - {*axes}:
        array, axes = array[None], missing + axes
    batch = array.transpose([axes.index(axis) for axis in "NHWC"])
    if batch.dtype.kind == "f":
        batch = (batch.clip(0, 1) * 255).round()
    elif batch.dtype.kind == "b":
        batch = batch * 255
    return list(np.ascontiguousarray(batch.astype(np.uint8)))


def named_images(
    images: Mapping[str, list[np.ndarray[Any, Any]]], separator: str = "/"
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield single images with their names, to which the numbers are added where one name has several."""
    for name, batch in images.items():
        for number, image in enumerate(batch):
            yield name if len(batch) == 1 else f"{name}{separator}{number}", image


def copy_to_host(values: Mapping[str, Any], streams: dict[torch.device, DeviceStreams]) -> dict[str, Any]:
    """Copy the values of one call of `log`, with tensors and arrays as they are now and texts as keys.

    Tensors on a device with streams are copied asynchronously, on its current stream, and the device is added
    to `streams`: until that work is done, the copies hold anything.

    Raises:
        UnsupportedError: A value is a `DTensor` of which this rank does not have all elements.
    """
    copied: dict[str, Any] = {}
    for name, value in values.items():
        copied[str(name)] = value
        if isinstance(value, Tensor):
            copied[str(name)] = _copy_tensor(name, value, streams)
        elif isinstance(value, np.ndarray):
            copied[str(name)] = value.copy()
        elif isinstance(value, dict):
            copied[str(name)] = copy_to_host(cast("dict[str, Any]", value), streams)
    return copied


def _copy_tensor(name: str, value: Tensor, streams: dict[torch.device, DeviceStreams]) -> Tensor:
    distributed: Any = sys.modules.get("torch.distributed.tensor")
    if distributed is not None and isinstance(value, distributed.DTensor):
        dtensor: Any = value
        if not all(placement.is_replicate() for placement in dtensor.placements):
            raise UnsupportedError(
                f"log() got {name!r}, a DTensor with the placements {dtensor.placements}, of which this rank "
                "has only a part: pass its `full_tensor()`, which every rank must call."
            )
        value = dtensor.to_local()
    if value.is_meta:
        return value
    of_device = device_streams(value.device)
    if of_device is None:
        return value.detach().to("cpu", copy=True)
    streams[value.device] = of_device
    try:
        return value.detach().to("cpu", non_blocking=True)
    except RuntimeError:  # WSL2 and containers limit pinned memory
        return value.detach().to("cpu")


def with_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy values, also in inner dictionaries, with numbers for tensors and arrays with one element."""
    return {
        name: with_numbers(cast("dict[str, Any]", value)) if isinstance(value, dict) else to_number(value)
        for name, value in values.items()
    }
