"""Every operator of a thread as reads and writes of a stream, and torch's own ways to pin and to upload."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from accel_state.testing.storages import storage_id

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from accel_state.testing.late import LateDevice

_METADATA_ONLY = re.compile(r"^aten::(new_.*|.*_like|set_|resize_)$")
_WITHOUT_VALUES = re.compile(r"^aten::(new_empty.*|empty.*)$")
_TO_HOST = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::is_nonzero", "aten::item"}
"""Operators whose result is known to the host when they return."""

_torch_c: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_parse_to = _torch_c._nn._parse_to


class OperatorMode(TorchDispatchMode):
    """Tell a device about all operators of this thread."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Register the operator's accesses; take over copies between pinned and device memory."""
        kwargs = kwargs or {}
        device = self._device
        leaves = pytree.tree_leaves((args, kwargs))
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # the operators on its inner tensors come here next
        name = func._schema.name
        if device.is_inside or func.is_view:
            return func(*args, **kwargs)
        if name == "aten::copy_" and device.is_device_copy(*args[:2]):
            return _plain_copy(device, *args, **kwargs)
        reads, writes = _accesses(func, args, kwargs)
        actor = device.before_operator(name, reads, writes)
        outputs = func(*args, **kwargs)
        fresh: list[Tensor] = []
        if not _WITHOUT_VALUES.match(name):
            old = {storage_id(leaf) for leaf in leaves if _is_plain(leaf)}
            results = (leaf for leaf in pytree.tree_leaves(outputs) if _is_plain(leaf))
            fresh = [leaf for leaf in results if storage_id(leaf) not in old]
        device.after_operator(name, fresh, actor, waits=name in _TO_HOST)
        return outputs


class TransferMode(TorchFunctionMode):
    """Give `pin_memory`, `is_pinned` and `to` of this thread the meaning they have with a device."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Do what a device would do, or what the function does."""
        kwargs = kwargs or {}
        if func is torch.Tensor.pin_memory:
            return self._device.pin(args[0])
        if func is torch.Tensor.is_pinned:
            return self._device.is_pinned(args[0])
        if func is torch.Tensor.to and self._device.is_pinned(args[0]):
            return self._to(*args, **kwargs)
        return func(*args, **kwargs)

    def _to(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        device, dtype, non_blocking, _ = _parse_to(*args, **kwargs)
        if device is None:
            return tensor.to(*args, copy=copy, **kwargs)
        moved = self._device.upload(tensor, blocking=not non_blocking)
        return moved if dtype is None else moved.to(dtype)


def _plain_copy(device: LateDevice, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    device.plain_copy(target, source, blocking=not non_blocking)
    return target


def _accesses(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operator reads, and the arguments that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    schema = func._schema
    if _METADATA_ONLY.match(schema.name):
        return [], []
    positional = zip(schema.arguments, args, strict=False)
    for argument, value in (
        *positional,
        *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
    ):
        alias = argument.alias_info
        if alias is not None and not alias.is_write:
            continue  # a view of it is returned
        tensors = [leaf for leaf in pytree.tree_leaves(value) if _is_plain(leaf)]
        if alias is not None:
            writes += tensors
        else:
            reads += tensors
    return reads, writes


def _is_plain(value: Any) -> bool:
    """Whether a value is a tensor with memory that can be tracked."""
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )
