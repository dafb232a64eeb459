"""One offloaded tensor in its module: on the meta device between forwards."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

from torch import Tensor, nn

from accel_bigmodel.placement import as_parameter, owner_of
from accel_ops.weights.tensors import buffer_table, parameter_table


class Slot(Protocol):
    """What an offloading hook does with one tensor."""

    name: str

    def enter(self, value: Tensor) -> None:
        """Let the module hold a value, which is on the device where it is used."""
        ...

    def leave(self) -> None:
        """Let the module hold a meta tensor; keep nothing that takes memory on a device."""
        ...


class PlainSlot:
    """The slot of a plain parameter or buffer."""

    __slots__ = ("_last", "_leaf", "_live", "_meta", "_table", "name")

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        owner, self._leaf = owner_of(module, name)
        self.name = name
        is_parameter = self._leaf in parameter_table(owner)
        self._table: dict[str, Any] = parameter_table(owner) if is_parameter else buffer_table(owner)
        empty = tensor.detach().to("meta")
        self._meta = tensor if tensor.is_meta else as_parameter(empty, tensor) if is_parameter else empty
        self._last: weakref.ref[Tensor] | None = None
        self._live: Tensor | None = None

    def enter(self, value: Tensor) -> None:
        """Hold a value. The parameter made of the same value last time is used again."""
        if not isinstance(self._meta, nn.Parameter):
            self._table[self._leaf] = value
            return
        if self._last is None or value is not self._last():
            self._live = as_parameter(value, self._meta)
            self._last = weakref.ref(value)
        self._table[self._leaf] = self._live

    def leave(self) -> None:
        """Hold the meta tensor. Only a value that somebody else keeps in host memory is remembered."""
        self._table[self._leaf] = self._meta
        value = None if self._last is None else self._last()
        if value is None or value.device.type != "cpu":
            self._last = self._live = None


@functools.singledispatch
def slot_of(tensor: Tensor, module: nn.Module, name: str) -> Slot:
    """Make the slot of a tensor.

    A package with a parameter class of its own registers a slot for it.
    """
    return PlainSlot(module, name, tensor)
