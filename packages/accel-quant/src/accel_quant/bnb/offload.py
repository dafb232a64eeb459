"""Offloaded quantised weights: between forwards the values are evicted, the scales stay on the device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from accel_bigmodel.hooks.slot import slot_of
from accel_bigmodel.placement import owner_of
from accel_ops.weights.tensors import parameter_table
from accel_quant.bnb.convert import bitsandbytes
from accel_quant.bnb.exact import never_pack

if TYPE_CHECKING:
    from torch import Tensor, nn


@functools.cache
def register_slots() -> None:
    """Register with offloading hooks how quantised parameters are flattened."""
    bnb = bitsandbytes()
    slot_of.register(bnb.nn.Int8Params, lambda tensor, module, name: Int8Slot(module, name, tensor))
    slot_of.register(bnb.nn.Params4bit, _4bit_slot)


class QuantizedSlot:
    """The slot of a quantised weight."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        self.name = name
        self._owner, self._leaf = owner_of(module, name)
        self._table = parameter_table(self._owner)
        self._class: Any = type(tensor)
        self._attributes: dict[str, Any] = dict(vars(tensor))
        self._meta: Any = self._class(tensor.data.to("meta"), requires_grad=False, **self._attributes)

    def enter(self, value: Tensor) -> None:
        """Hold the weight made of its numbers and its scales."""
        self._table[self._leaf] = self._class(value, requires_grad=False, **self._statistics(value))

    def leave(self) -> None:
        """Hold a meta tensor with the scales, which state dicts name beside the weight."""
        self._table[self._leaf] = self._meta

    def _statistics(self, value: Tensor) -> dict[str, Any]:
        state = self._attributes["quant_state"]
        state.to(value.device)
        return self._attributes


class Int8Slot(QuantizedSlot):
    """The slot of an 8-bit weight, whose layer keeps numbers and scales in a state of its own."""

    def __init__(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        super().__init__(module, name, tensor)
        owner: Any = self._owner
        scales = self._attributes.get("SCB")
        self._scales: Tensor = owner.state.SCB if scales is None else scales
        self._meta.CB, self._meta.SCB = None, self._scales

    def leave(self) -> None:
        """Hold a meta tensor, and let the layer forget the numbers."""
        owner: Any = self._owner
        owner.state.CB = owner.state.SCB = None
        super().leave()

    def _statistics(self, value: Tensor) -> dict[str, Any]:
        self._scales = self._meta.SCB = self._scales.to(value.device)
        return {"has_fp16_weights": False, "CB": value, "SCB": self._scales}


def _4bit_slot(tensor: Tensor, module: nn.Module, name: str) -> QuantizedSlot:
    # Weights come unpacked each time.
    never_pack(owner_of(module, name)[0])
    return QuantizedSlot(module, name, tensor)
