"""Infer a device map."""

from __future__ import annotations

import logging
import warnings
from itertools import accumulate
from operator import ne
from typing import TYPE_CHECKING, Any

from accel_bigmodel.device_map.budget import get_balanced_memory, get_max_memory
from accel_bigmodel.device_map.fallback import assign_by_size
from accel_bigmodel.device_map.plan import Machine, assign_units, devices_of, units_of
from accel_bigmodel.layers import class_names, read_layers
from accel_bigmodel.sizes import byte_count, streamed_count
from accel_ops.weights.sizes import convert_bytes
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from accel_bigmodel.device_map.plan import Units
    from accel_bigmodel.device_map.workload import Workload
    from accel_bigmodel.layers import Layers
    from accel_bigmodel.sizes import ElementType

_log = logging.getLogger(__name__)
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")

Device = int | str


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    workload: Workload | None = None,
    stored_dtypes: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Device]:
    """Fill accelerators in order, then the CPU, then the disk, with the layers of a model.

    Promises: no device gets more than its memory. When something is offloaded, the main device has room left
    for two of the largest offloaded blocks (one runs while the next is copied), or for one where two would
    leave no layer on it; and the CPU for the largest layer on the disk. A block is a module without a list of
    modules in it. Modules of the classes named stay whole. Tied weights count once and live together. The
    time is linear in the number of modules.

    Args:
        model: The model, on any device, the meta device too.
        max_memory: Device to bytes or text like `"10GB"`; by default what is free. The disk is endless.
        no_split_module_classes: Names of classes whose modules stay whole, such as blocks with residuals.
        dtype: The type that floating weights will have once loaded.
        special_dtypes: Types of single tensors, by name; they come before `dtype`.
        verbose: Log where each layer goes.
        clean_result: Give one entry for a module whose parts all live together.
        offload_buffers: Whether buffers of offloaded layers are offloaded; else the main device keeps them.
        fallback_allocation: Where an accelerator would stay empty since the next layer is too large for it,
            give it another layer that fits.
        workload: Activations and cache to be counted with the weights.
        stored_dtypes: Types of tensors in the checkpoint, by name: one that is read from the disk in another
            type than it is used in takes room in both.

    Returns:
        Module (or tensor) name to device: an index, `"cpu"` or `"disk"`.

    Warns:
        UserWarning: Buffers of offloaded layers find no room on the main device.

    Raises:
        SettingsError: A size or a device in `max_memory` cannot be read.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        >>> infer_auto_device_map(model, {0: 240, "cpu": 1000})
        {'': 0}
        >>> infer_auto_device_map(model, {0: 200, "cpu": 1000})
        {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    memory = get_max_memory(max_memory)
    devices = [key for key in memory if key != "disk"]
    unsplit, count = class_names(no_split_module_classes), byte_count(dtype, special_dtypes)
    layers = read_layers(model, unsplit, count)
    disk_blocks = None
    if stored_dtypes is not None:
        disk_blocks = read_layers(model, unsplit, streamed_count(count, dtype, stored_dtypes)).blocks
    units = units_of(layers, workload, disk_blocks)
    machine = _machine(devices, memory, keep_buffers=not offload_buffers)
    placed = devices_of(assign_units(units, machine), len(units.sizes))
    if fallback_allocation:
        depths = [layers.names[members[0]].count(".") for members in units.members]
        placed = assign_by_size(units, depths, placed, machine)
    keys: list[Device] = [*devices, "disk"]
    _warn_of_buffers(units, placed, machine)
    _log_unused(units, placed, machine, keys)
    where = [0] * len(layers.names)
    for members, device in zip(units.members, placed, strict=True):
        for layer in members:
            where[layer] = device
    if verbose:
        for name, size, device in zip(layers.names, layers.totals, where, strict=True):
            _log.info("%s: %s on %s", name or "the model", convert_bytes(size), keys[device])
    if not clean_result:
        return {name: keys[device] for name, device in zip(layers.names, where, strict=True)}
    return {name: keys[device] for name, device in merged(layers, where)}


def automatic_device_map(
    kind: str,
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None,
    no_split: str | Sequence[str] | None,
    offload_buffers: bool = False,
    *,
    stored_dtypes: Mapping[str, torch.dtype] | None = None,
    **dtypes: Any,
) -> dict[str, Device]:
    """Infer the device map that users ask for by a word, such as `"balanced"`.

    Raises:
        SettingsError: It is no such word.
    """
    if kind not in _AUTOMATIC:
        raise SettingsError(
            f"device_map is {kind!r}: write one of {', '.join(map(repr, _AUTOMATIC))}, or a mapping"
        )
    if kind != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split, low_zero=kind == "balanced_low_0", **dtypes
        )
    return infer_auto_device_map(
        model, max_memory, no_split, offload_buffers=offload_buffers, stored_dtypes=stored_dtypes, **dtypes
    )


def merged(layers: Layers, where: Sequence[int]) -> list[tuple[str, int]]:
    """Merge a device map into the fewest entries: one for each topmost module whose layers share a device.

    Example:
        >>> from torch import nn
        >>> layers = read_layers(nn.Sequential(nn.ReLU(), nn.ReLU()), frozenset(), byte_count(None, None))
        >>> merged(layers, [0, 0]), merged(layers, [0, 1])
        ([('', 0)], [('0', 0), ('1', 1)])
    """
    changes = list(accumulate(map(ne, where, where[1:]), initial=0))
    result: list[tuple[str, int]] = []
    modules = [*layers.modules, ("", -1, 0, 0)]
    layer = index = 0
    while layer < len(where):
        name, first, end, following = modules[index]
        if first != layer:
            result.append((layers.names[layer], where[layer]))
            layer += 1
        elif first < end and changes[first] == changes[end - 1]:
            result.append((name, where[first]))
            layer, index = end, following
        else:
            index += 1
    return result


def _machine(devices: Sequence[Device], memory: Mapping[Device, int], *, keep_buffers: bool) -> Machine:
    accelerators = [key for key in devices if key != "cpu"]
    alone = not accelerators  # then the CPU executes what it holds
    return Machine(
        capacities=tuple(memory[key] for key in devices),
        executors=len(devices) if alone else len(accelerators),
        host=None if alone or "cpu" not in memory else list(devices).index("cpu"),
        keep_buffers=keep_buffers,
        streamed=1 if alone else 2,
    )


def _warn_of_buffers(units: Units, placed: Sequence[int], machine: Machine) -> None:
    """Warn if buffers find no room on the main device, or kept every layer from the accelerators."""
    if not machine.keep_buffers or not machine.executors:
        return
    main = min(placed, default=0)
    used = buffers = 0
    for size, buffer, device in zip(units.sizes, units.buffers, placed, strict=True):
        used += size if device == main else 0
        buffers += buffer if device >= machine.executors else 0
    is_used = main < machine.executors
    room = machine.capacities[main] - used if is_used else max(machine.capacities[: machine.executors])
    if buffers and buffers > room:
        warnings.warn(
            f"The buffers of offloaded layers take {convert_bytes(buffers)} on the main device, which has no "
            "room for them: pass offload_buffers=True.",
            stacklevel=3,
        )


def _log_unused(units: Units, placed: Sequence[int], machine: Machine, keys: Sequence[Device]) -> None:
    """Log how much memory each accelerator without a layer would need for the next one in order."""
    for device in range(machine.executors):
        later = [index for index, where in enumerate(placed) if where > device and units.sizes[index]]
        if device in placed or not later:
            continue
        largest = max((units.totals[index] for index in later[1:]), default=0)
        _log.info(
            "No layer was placed on device %s: with its reserve, the next one takes %s.",
            keys[device],
            convert_bytes(units.sizes[later[0]] + largest),
        )
