"""Images of any layout as arrays that every library takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from accel_state.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        return [image for one in value for image in to_images(name, one, dataformats)]
    if isinstance(value, torch.Tensor):
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    array = np.asarray(value)
    axes = dataformats or _axes(array.shape)
    if axes is None or len(axes) != array.ndim or set(axes) - set("NHWC"):
        raise UnsupportedError(
            f"log_images() got {name!r} of shape {array.shape} with dataformats={dataformats!r}: give "
            "(H, W), (H, W, C), (C, H, W) or a batch of these, with 1, 3 or 4 channels."
        )
    for missing in "CN":
        if missing not in axes:
            array, axes = array[None], missing + axes
    batch = array.transpose([axes.index(axis) for axis in "NHWC"])
    if batch.dtype.kind == "f":
        batch = (batch.clip(0, 1) * 255).round()
    return list(np.ascontiguousarray(batch.astype(np.uint8)))


def named_images(
    values: Mapping[str, Any], dataformats: str | None, separator: str = "/"
) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Yield single images with their names, to which the numbers are added where one name has several."""
    for name, value in values.items():
        images = to_images(name, value, dataformats)
        for number, image in enumerate(images):
            yield name if len(images) == 1 else f"{name}{separator}{number}", image


def _axes(shape: tuple[int, ...]) -> str | None:
    if len(shape) == 2:
        return "HW"
    if len(shape) not in (3, 4):
        return None
    batch = "N" if len(shape) == 4 else ""
    if shape[-1] in _CHANNELS:
        return f"{batch}HWC"
    return f"{batch}CHW" if shape[-3] in _CHANNELS else None


def to_numbers(value: Any) -> np.ndarray[Any, Any]:
    """Convert a tensor, array or sequence of numbers to a flat array of floats.

    Example:
        >>> to_numbers([[1, 2], [3, 4]])
        array([1., 2., 3., 4.])
    """
    host = value.detach().cpu().double().numpy() if isinstance(value, torch.Tensor) else value
    return np.asarray(host, dtype=np.float64).reshape(-1)
