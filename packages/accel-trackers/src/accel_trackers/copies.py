"""Values of tensors that are read later: copied to the host on the side, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from accel_state.streams import device_streams, replaced_streams
from accel_trackers.values import ARRAYS, PLAIN, check_scalar, read_number

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from accel_state.streams import DeviceStreams, Event

_ALIGNMENT = 16


Waiting: TypeAlias = "dict[torch.device, list[Tensor]]"
"""Tensors that are read later, by their device."""


def capture(values: Mapping[str, Any], waiting: Waiting) -> dict[str, Any]:
    """Copy the values of one call of `log`, with numbers for tensors and arrays with one element.

    A tensor on a device with streams is not read: it is put into `waiting`, with its place in the copy, for a
    `Reading`.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> waiting = {}
        >>> capture({"loss": torch.tensor(0.5), "lr": {"head": np.float32(2)}}, waiting), waiting
        ({'loss': 0.5, 'lr': {'head': 2.0}}, {})
    """
    captured = {**values}
    has_other_names = False
    for name, value in values.items():
        if type(value) in PLAIN and type(name) is str:  # most of them
            continue
        if type(name) is not str:
            has_other_names = True
        if isinstance(value, Tensor):
            is_read = (value.is_cpu and not replaced_streams) or device_streams(value.device) is None
            captured[name] = read_number(name, value) if is_read else _reserve(str(name), value, waiting)
        elif isinstance(value, ARRAYS):
            captured[name] = read_number(name, value)
        elif isinstance(value, dict):
            captured[name] = capture(value, waiting)
    return {str(name): value for name, value in captured.items()} if has_other_names else captured


def _reserve(name: str, tensor: Tensor, waiting: Waiting) -> _Index:
    check_scalar(name, tensor)
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
        """Return the values with numbers for tensors; wait for what is still on its way."""
        numbers = {device: copies.numbers() for device, copies in self._copies.items()}
        return _fill(self._captured, numbers)


@dataclass(slots=True)
class _Index:
    """Where in the copies a value will be."""

    device: torch.device
    index: int


class HostCopies:
    """Single elements of tensors of one device, copied to one pinned buffer."""

    def __init__(self, tensors: list[Tensor]) -> None:
        streams = device_streams(tensors[0].device)
        if streams is None:
            raise AssertionError(tensors[0].device)
        self._tensors: list[Tensor] | None = tensors  # alive until they are copied
        buffer = streams.pinned(_ALIGNMENT * len(tensors))
        self._copies = [_copy(streams, buffer, index, one) for index, one in enumerate(tensors)]
        self._event: Event = streams.new_event()
        self._event.record(streams.current_stream())

    def is_ready(self) -> bool:
        """Whether everything is copied."""
        return self._event.query()

    def numbers(self) -> list[Any]:
        """Return the values in order; wait for the copies."""
        self._event.synchronize()
        self._tensors = None
        return [copy.item() for copy in self._copies]


def _copy(streams: DeviceStreams, buffer: Tensor, index: int, tensor: Tensor) -> Tensor:
    first = index * _ALIGNMENT
    target = buffer[first : first + tensor.element_size()].view(tensor.dtype)
    streams.copy_(target, tensor.reshape(1))
    return target


def _fill(values: Mapping[str, Any], numbers: Mapping[torch.device, list[Any]]) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, _Index):
            filled[name] = numbers[value.device][value.index]
        else:
            filled[name] = _fill(value, numbers) if isinstance(value, dict) else value
    return filled
