"""How much each device may hold: what is free, and the shares that balance a model."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from accel_bigmodel.device_map.plan import Units, fill, units_of
from accel_bigmodel.host_memory import available_host_memory
from accel_bigmodel.layers import class_names, read_layers
from accel_bigmodel.sizes import byte_count
from accel_ops.weights.sizes import convert_file_size_to_int
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from accel_bigmodel.device_map.workload import Workload
    from accel_bigmodel.sizes import ElementType

_log = logging.getLogger(__name__)
_HOST = ("cpu", "disk")

MemoryMap = dict[int | str, int]


def get_max_memory(max_memory: Mapping[int | str, float | str] | None = None) -> MemoryMap:
    """Return the memory budget of each device, in bytes.

    Args:
        max_memory: Device to bytes, or to text like `"10GB"`, which is turned into bytes in a dictionary that
            is given, too, as callers expect; devices that it lacks get nothing. By default, what is free now
            on every accelerator, and this rank's part of the host memory that is free within the limits of
            its control group; the host's is left out where an accelerator's is the same memory (integrated
            GPUs, Apple's).

    Returns:
        Bytes by device: accelerators in order, then `"cpu"`, then `"disk"`.

    Raises:
        SettingsError: A size cannot be read, or a key is no device.

    Example:
        >>> get_max_memory({"cpu": "1GB", 0: "2GiB"})
        {0: 2147483648, 'cpu': 1000000000}
    """
    if max_memory is None:
        found: MemoryMap = {index: _free(index) for index in range(torch.accelerator.device_count())}
        return found if any(map(_is_unified, found)) else {**found, "cpu": available_host_memory()}
    if not isinstance(max_memory, Mapping):
        raise SettingsError(
            f"max_memory is {reprlib.repr(max_memory)}: pass a mapping of devices to sizes, as {{0: '10GB'}}"
        )
    sizes = {_device_key(key): convert_file_size_to_int(size) for key, size in max_memory.items()}
    negative = [key for key, size in sizes.items() if size < 0]
    if negative:
        raise SettingsError(
            f"max_memory[{negative[0]!r}] is {sizes[negative[0]]}: a device holds 0 bytes or more"
        )
    if isinstance(max_memory, dict):
        max_memory.update({key: sizes[_device_key(key)] for key in max_memory})
    indexed = sorted(key for key in sizes if isinstance(key, int))
    named = [key for key in sizes if isinstance(key, str) and key not in _HOST]
    return {key: sizes[key] for key in (*indexed, *named, *(key for key in _HOST if key in sizes))}


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
    low_zero: bool = False,
    *,
    workload: Workload | None = None,
) -> MemoryMap:
    """Bound each accelerator so that `infer_auto_device_map` makes the largest share as small as can be.

    The smallest bound is found exactly, by bisection over contiguous partitions of the layers. The last
    accelerator keeps all its memory, in case the model is larger once it runs, unless the model has so few
    layers that the first one could take them all.

    Args:
        model: The model, on any device, the meta device too.
        max_memory: What each device may take; by default what is free.
        no_split_module_classes: Names of classes whose modules stay whole.
        dtype: The type that floating weights will have once loaded.
        special_dtypes: Types of single tensors, by name.
        low_zero: Give the first accelerator only what the others cannot hold, so that it has room for
            generation.
        workload: Activations and cache to be counted with the weights.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        >>> get_balanced_memory(model, {0: 1000, 1: 1000})
        {0: 192, 1: 1000}
    """
    memory = get_max_memory(max_memory)
    devices = [key for key, size in memory.items() if key not in _HOST and size > 0]
    if len(devices) < 2:
        return memory
    layers = read_layers(model, class_names(no_split_module_classes), byte_count(dtype, special_dtypes))
    units = units_of(layers, workload)
    if low_zero:
        others = sum(memory[key] for key in devices[1:])
        memory[devices[0]] = min(memory[devices[0]], max(0, units.sums[-1] - others))
        devices = devices[1:]
    reserve = 0 if low_zero else max(units.totals, default=0)
    budget = [memory[key] for key in devices]
    bound, bounded = smallest_bound(units, [max(0, budget[0] - reserve), *budget[1:]]), devices[:-1]
    if bound is None:
        reserve, bound = 0, smallest_bound(units, budget)
    elif reserve and bound + reserve >= units.sums[-1]:
        # With room for another layer the first would take everything: bound them all, and leave no such room.
        reserve, bound, bounded = 0, smallest_bound(units, budget), devices
    if bound is None:
        _log.info("The model is larger than all accelerators together: they are filled, not balanced.")
        return memory
    bounds = [bound + reserve, *[bound] * len(devices)]
    return {**memory, **{key: min(memory[key], size) for key, size in zip(bounded, bounds, strict=False)}}


def smallest_bound(units: Units, capacities: Sequence[int]) -> int | None:
    """Find the smallest largest share of a contiguous partition that no capacity forbids; `None` without one.

    Bisection on the answer with a greedy check, exact for contiguous parts (Skiena, The Algorithm Design
    Manual, "linear partition", solved by search on the bound).

    Example:
        >>> from accel_bigmodel.layers import Layers
        >>> layers = Layers(names=["a", "b", "c"], sizes=[3, 1, 2], totals=[3, 1, 2], buffers=[0, 0, 0])
        >>> smallest_bound(units_of(layers), [10, 10])
        3
    """
    high = units.sums[-1] + max(units.actives, default=0)

    def fits(bound: int) -> bool:
        return fill(units, [min(bound, budget) for budget in capacities])[-1] == len(units.sizes)

    if not fits(high):
        return None
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _device_key(key: int | str) -> int | str:
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    if isinstance(key, str) and key != "disk":
        try:
            torch.device(key)
        except RuntimeError as error:
            raise SettingsError(
                f"max_memory names {key!r}, which is no device: write 0, 'cpu' or 'disk'"
            ) from error
    return key


def _free(index: int) -> int:
    module = _device_module()
    if hasattr(module, "mem_get_info"):
        return int(module.mem_get_info(index)[0])
    return available_host_memory()


def _is_unified(index: int | str) -> bool:
    """Return whether an accelerator computes in the memory of the host."""
    module = _device_module()
    if not hasattr(module, "mem_get_info"):
        return True  # Apple's
    return bool(getattr(module.get_device_properties(index), "is_integrated", False))


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    return getattr(torch, accelerator.type if accelerator is not None else "cuda")
