"""Values of tensors that are read later: copied to the host on the side, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from accel_state.streams import device_streams, tensor_streams
from accel_trackers.values import ARRAYS, PLAIN, to_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from accel_state.streams import DeviceStreams, Event

_ALIGNMENT = 16


Waiting: TypeAlias = "dict[torch.device, list[Tensor]]"
"""Tensors that are read later, by their device."""


def capture(values: Mapping[str, Any], waiting: Waiting, vectors: list[Any]) -> dict[str, Any]:
    """Copy the values of one call of `log`, with numbers for tensors and arrays with one element.

    A tensor on a device with streams is not read: it is put into `waiting`, with its place in the copy, for a
    `Reading`. The names of tensors and arrays that are no single number are put into `vectors`.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> waiting, vectors = {}, []
        >>> capture({"loss": torch.tensor(0.5), "lr": {"head": np.float32(2)}}, waiting, vectors)
        {'loss': 0.5, 'lr': {'head': 2.0}}
        >>> waiting, vectors
        ({}, [])
    """
    captured = {**values}
    has_other_names = False
    for name, value in values.items():
        if type(value) in PLAIN and type(name) is str:  # most of them
            continue
        if type(name) is not str:
            has_other_names = True
        if isinstance(value, Tensor) and tensor_streams(value) is not None:
            captured[name] = _reserve(value, waiting)
            if value.numel() != 1:
                vectors.append(name)
        elif isinstance(value, ARRAYS):
            captured[name] = number = to_number(value)
            if number is value:
                captured[name] = _host_copy(value)
                vectors.append(name)
        elif isinstance(value, dict):
            captured[name] = capture(value, waiting, vectors)
    return {str(name): value for name, value in captured.items()} if has_other_names else captured


def _host_copy(vector: Any) -> Any:
    if not isinstance(vector, Tensor):
        return vector.copy()
    return vector if vector.is_meta else vector.detach().to("cpu", copy=True)


def _reserve(tensor: Tensor, waiting: Waiting) -> _Index:
    tensors = waiting.setdefault(tensor.device, [])
    tensors.append(tensor.detach())
    return _Index(tensor.device, len(tensors) - 1)


class Reading:
    """Values of one call of `log`, with tensors among them on their way to the host.

    The tensors are copied to pinned memory on their own stream, after everything that computes them and
    before everything that changes them later.
    """

    def __init__(self, captured: dict[str, Any], waiting: Waiting) -> None:
        self._captured = captured
        self._copies = {device: HostCopies(tensors) for device, tensors in waiting.items()}

    def is_ready(self) -> bool:
        """Whether `values` does not wait."""
        return all(copies.is_ready() for copies in self._copies.values())

    def values(self) -> dict[str, Any]:
        """Return the values with what tensors hold; wait for what is still on its way."""
        read = {device: copies.values() for device, copies in self._copies.items()}
        return _fill(self._captured, read)


@dataclass(slots=True)
class _Index:
    """Where in the copies a value will be."""

    device: torch.device
    index: int


class HostCopies:
    """Tensors of one device, copied to one pinned buffer."""

    def __init__(self, tensors: list[Tensor]) -> None:
        streams = device_streams(tensors[0].device)
        if streams is None:
            raise AssertionError(tensors[0].device)
        tensors = [tensor.contiguous() for tensor in tensors]
        self._tensors: list[Tensor] | None = tensors  # alive until they are copied
        sizes = (-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
        *starts, end = accumulate(sizes, initial=0)
        buffer = streams.pinned(end)
        self._copies = [_copy(streams, buffer, *where) for where in zip(starts, tensors, strict=True)]
        self._event: Event = streams.new_event()
        self._event.record(streams.current_stream())

    def is_ready(self) -> bool:
        """Whether everything is copied."""
        return self._event.query()

    def values(self) -> list[Any]:
        """Return numbers, and host tensors for what is no single number, in order; wait for the copies."""
        self._event.synchronize()
        self._tensors = None
        return [copy.item() if copy.numel() == 1 else copy.clone() for copy in self._copies]


def _copy(streams: DeviceStreams, buffer: Tensor, start: int, tensor: Tensor) -> Tensor:
    target = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    streams.copy_(target, tensor)
    return target


def _fill(values: Mapping[str, Any], read: Mapping[torch.device, list[Any]]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, _Index):
            filled[name] = read[value.device][value.index]
        else:
            filled[name] = _fill(value, read) if isinstance(value, dict) else value
    return filled
