"""Device maps: memory budgets, `infer_auto_device_map`, pipeline stages, checks of a user's map."""

from __future__ import annotations

import logging
import operator
import reprlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from accel_bigmodel.device_plan import (
    DeviceBudgets,
    PlacementUnits,
    assign_by_size,
    assign_units,
    devices_of,
    fill,
    units_of,
)
from accel_bigmodel.host_to_device import available_host_memory
from accel_bigmodel.sizes import byte_count, class_names, read_layers
from accel_ops.weights.layout import convert_bytes, convert_file_size_to_int
from accel_ops.weights.read import device_of
from accel_ops.weights.tensors import named_module_tensors
from accel_state.errors import SettingsError, first_line, some_of

if TYPE_CHECKING:
    from accel_bigmodel.sizes import ElementType, Layers

    Device = int | str | torch.device


_log = logging.getLogger(__name__)
_HOST = ("cpu", "disk")

DeviceKey = int | str
MemoryMap = dict[DeviceKey, int]
T = TypeVar("T")


def get_max_memory(max_memory: Mapping[int | str, float | str] | None = None) -> MemoryMap:
    """Return the memory budget of each device, in bytes.

    Args:
        max_memory: Device to bytes, or to text like `"10GB"`, which is converted to bytes in the passed
            dictionary, too, as callers expect; missing devices get no memory. By default, the free memory
            of every accelerator that can be used, once its libraries have taken theirs, and this rank's
            share of the free host memory within the limits of its control group; host memory is omitted if
            an accelerator shares it (integrated GPUs, Apple silicon).

    Returns:
        Bytes by device: accelerators in order, then `"cpu"`, then `"disk"`.

    Raises:
        SettingsError: A size is invalid, or a key is not a device.

    Example:
        >>> get_max_memory({"cpu": "1GB", 0: "2GiB"})
        {0: 2147483648, 'cpu': 1000000000}
    """
    if max_memory is None:
        free: MemoryMap = {}
        for index in range(torch.accelerator.device_count()):
            try:
                free[index] = _free(index)
            except RuntimeError as error:
                _log.warning("Device %d cannot be used, and gets no layers: %s", index, first_line(error))
        return free if any(map(_is_unified, free)) else {**free, "cpu": available_host_memory()}
    if not isinstance(max_memory, Mapping):
        raise SettingsError(
            f"max_memory is {reprlib.repr(max_memory)}: pass a mapping of devices to sizes, as {{0: '10GB'}}"
        )
    sizes = {_device_key(key): convert_file_size_to_int(size) for key, size in max_memory.items()}
    negative = [key for key, size in sizes.items() if size < 0]
    if negative:
        raise SettingsError(f"max_memory[{negative[0]!r}] is {sizes[negative[0]]}: expected 0 bytes or more")
    if isinstance(max_memory, dict):
        max_memory.update({key: sizes[_device_key(key)] for key in max_memory})
    indexed = sorted(key for key in sizes if isinstance(key, int))
    named = [key for key in sizes if isinstance(key, str) and key not in _HOST]
    return {key: sizes[key] for key in (*indexed, *named, *(key for key in _HOST if key in sizes))}


def _budgets(max_memory: Mapping[int | str, float | str] | None) -> MemoryMap:
    """Return the memory for weights: of free memory, the main device keeps a tenth for activations."""
    memory = get_max_memory(max_memory)
    main = next((key for key in memory if key not in _HOST), None)
    if max_memory is None and main is not None:
        memory[main] -= memory[main] // 10
    return memory


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    dtype: ElementType | None = None,
    special_dtypes: Mapping[str, ElementType] | None = None,
    low_zero: bool = False,
) -> MemoryMap:
    """Bound the memory of each accelerator so that `infer_auto_device_map` balances the layers.

    It finds the smallest bound exactly, by bisection over contiguous partitions of the layers. The last
    accelerator keeps all its memory, in case the model is larger at run time, unless the model has so few
    layers that the first one could hold them all.

    Args:
        model: The model, on any device, including the meta device.
        max_memory: The limit of each device; by default its free memory, of the first accelerator 90 %.
        no_split_module_classes: Names of classes whose modules are not split across devices.
        dtype: The dtype of floating-point weights once loaded.
        special_dtypes: Dtypes of individual tensors, by name.
        low_zero: Assign to the first accelerator only layers that the others cannot hold, so that it has
            room for generation.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        >>> get_balanced_memory(model, {0: 1000, 1: 1000})
        {0: 192, 1: 1000}
    """
    memory = _budgets(max_memory)
    devices = [key for key, size in memory.items() if key not in _HOST and size > 0]
    if len(devices) < 2:
        return memory
    layers = read_layers(model, class_names(no_split_module_classes), byte_count(dtype, special_dtypes))
    units = units_of(layers)
    if low_zero:
        remaining = sum(memory[key] for key in devices[1:])
        memory[devices[0]] = min(memory[devices[0]], max(0, units.sums[-1] - remaining))
        devices = devices[1:]
    reserve = 0 if low_zero else max(units.totals, default=0)
    budget = [memory[key] for key in devices]
    bound, bounded = smallest_bound(units, [max(0, budget[0] - reserve), *budget[1:]]), devices[:-1]
    if bound is None:
        reserve, bound = 0, smallest_bound(units, budget)
    elif reserve and bound + reserve >= units.sums[-1]:
        # With room for another layer the first would take everything: bound them all, without that room.
        reserve, bound, bounded = 0, smallest_bound(units, budget), devices
    if bound is None:
        _log.info("The model is larger than all accelerators together: they are filled, not balanced.")
        return memory
    bounds = [bound + reserve, *[bound] * len(devices)]
    return {**memory, **{key: min(memory[key], size) for key, size in zip(bounded, bounds, strict=False)}}


def smallest_bound(units: PlacementUnits, capacities: Sequence[int]) -> int | None:
    """Minimise the largest share of a contiguous partition within the capacities; `None` if none fits.

    Bisection on the result with a greedy check, exact for contiguous parts (Skiena, The Algorithm Design
    Manual, "linear partition", solved by search on the bound).

    Example:
        >>> from accel_bigmodel.sizes import Layers
        >>> layers = Layers(names=["a", "b", "c"], sizes=[3, 1, 2], totals=[3, 1, 2], buffers=[0, 0, 0])
        >>> smallest_bound(units_of(layers), [10, 10])
        3
    """
    high = units.sums[-1]

    def fits(bound: int) -> bool:
        return fill(units, [min(bound, budget) for budget in capacities])[-1] == len(units.sizes)

    if not fits(high):
        return None
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _device_key(key: Any) -> DeviceKey:
    if isinstance(key, torch.device):
        key = key.type if key.index is None or key.type == "cpu" else key.index
    try:
        if isinstance(key, str) and not key.isdecimal():
            if key != "disk":
                torch.device(key)
            return key
        if isinstance(key, bool):
            raise TypeError
        return int(key) if isinstance(key, str) else operator.index(key)
    except (RuntimeError, TypeError) as error:
        raise SettingsError(
            f"max_memory names {reprlib.repr(key)}, which is not a device: use 0, 'cpu' or 'disk'"
        ) from error


def _free(index: int) -> int:
    module = _device_module()
    if not hasattr(module, "mem_get_info"):
        return available_host_memory()
    # The first product of matrices loads libraries and their workspaces, hundreds of MB of an NVIDIA GPU.
    square = torch.ones(16, 16, device=index)
    torch.mm(square, square)
    return int(module.mem_get_info(index)[0])


def _is_unified(index: int | str) -> bool:
    """Return whether an accelerator shares the host's memory."""
    module = _device_module()
    if not hasattr(module, "mem_get_info"):
        return True  # Apple silicon
    return bool(getattr(module.get_device_properties(index), "is_integrated", False))


def _device_module() -> Any:
    accelerator = torch.accelerator.current_accelerator()
    return getattr(torch, accelerator.type if accelerator is not None else "cuda")


_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


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
) -> dict[str, DeviceKey]:
    """Assign the layers of a model to accelerators in order, then the CPU, then the disk.

    No device gets more than its memory. A tenth of the first accelerator's free memory stays free; explicit
    limits of `max_memory` may be used up by a model that fits in them. If layers are offloaded, the main
    device has room left for two of the largest offloaded blocks (one runs while the next is copied), or for
    one if two would leave no layer on it; the CPU has room for the largest layer on the disk. A block is a
    module that contains no list of modules. Modules of `no_split_module_classes` are not split. Tied weights
    count once and share a device.
    The time is linear in the number of modules.

    Args:
        model: The model, on any device, including the meta device.
        max_memory: Device to bytes or text like `"10GB"`; by default free memory, of the first accelerator
            90 %. The disk has no limit.
        no_split_module_classes: Names of classes whose modules are not split, such as residual blocks.
        dtype: The dtype of floating-point weights once loaded.
        special_dtypes: Dtypes of individual tensors, by name; they take precedence over `dtype`.
        verbose: Log the device of each layer.
        clean_result: Merge the entries of a module that is entirely on one device.
        offload_buffers: Whether buffers of offloaded layers are offloaded; else the main device keeps them.
        fallback_allocation: If an accelerator would stay empty because the next layer is too large for it,
            assign another layer that fits.

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
    memory = _budgets(max_memory)
    devices = [key for key in memory if key != "disk"]
    layers = read_layers(model, class_names(no_split_module_classes), byte_count(dtype, special_dtypes))
    units = units_of(layers)
    machine = _machine(devices, memory, keep_buffers=not offload_buffers)
    placed = devices_of(assign_units(units, machine), len(units.sizes))
    if fallback_allocation:
        depths = [layers.names[members[0]].count(".") for members in units.members]
        placed = assign_by_size(units, depths, placed, machine)
    keys: list[DeviceKey] = [*devices, "disk"]
    _warn_of_buffers(units, placed, machine)
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
    **dtypes: Any,
) -> dict[str, DeviceKey]:
    """Infer a device map of a named kind, such as `"balanced"`.

    Raises:
        SettingsError: The kind is unknown.
    """
    if kind not in _AUTOMATIC:
        raise SettingsError(
            f"device_map is {reprlib.repr(kind)}: write a mapping, or one of {some_of(map(repr, _AUTOMATIC))}"
        )
    if kind != "sequential":
        max_memory = get_balanced_memory(
            model, max_memory, no_split, low_zero=kind == "balanced_low_0", **dtypes
        )
    return infer_auto_device_map(model, max_memory, no_split, offload_buffers=offload_buffers, **dtypes)


def merged(layers: Layers, where: Sequence[int]) -> list[tuple[str, int]]:
    """Merge a device map into the fewest entries: one per topmost module whose layers share a device.

    Example:
        >>> from torch import nn
        >>> layers = read_layers(nn.Sequential(nn.ReLU(), nn.ReLU()), frozenset(), byte_count(None, None))
        >>> merged(layers, [0, 0]), merged(layers, [0, 1])
        ([('', 0)], [('0', 0), ('1', 1)])
    """
    changes = list(accumulate(map(operator.ne, where, where[1:]), initial=0))
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


def _machine(
    devices: Sequence[DeviceKey], memory: Mapping[DeviceKey, int], *, keep_buffers: bool
) -> DeviceBudgets:
    accelerators = [key for key in devices if key != "cpu"]
    alone = not accelerators  # then the CPU executes its layers
    return DeviceBudgets(
        capacities=tuple(memory[key] for key in devices),
        executors=len(devices) if alone else len(accelerators),
        host=None if alone or "cpu" not in memory else list(devices).index("cpu"),
        keep_buffers=keep_buffers,
        streamed=1 if alone else 2,
    )


def _warn_of_buffers(units: PlacementUnits, placed: Sequence[int], machine: DeviceBudgets) -> None:
    """Warn if buffers do not fit on the main device, or leave no room for a layer on the accelerators."""
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
            f"The buffers of offloaded layers need {convert_bytes(buffers)} on the main device, which "
            "does not have enough memory: pass offload_buffers=True.",
            stacklevel=3,
        )


_ENDLESS = 1 << 62  # bytes


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
) -> dict[str, int | str]:
    """Assign the layers of a model to pipeline stages, so that the largest stage is as small as possible.

    Every process gets at least one layer. A tied weight is counted in every layer that has it, since every
    stage needs a copy.

    Args:
        model: The model, on any device, including the meta device. Its layers run in registration order.
        num_processes: Number of stages; with 1, the result is an ordinary device map.
        no_split_module_classes: Names of classes whose modules are not split.
        max_memory: The limit of each process; no limit by default.

    Returns:
        Module name to process index.

    Raises:
        SettingsError: There are fewer layers than processes, or `max_memory` cannot hold the model.

    Example:
        >>> from torch import nn
        >>> generate_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), 2)
        {'0': 0, '1': 0, '2': 1}
    """
    if num_processes == 1:
        return infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
    read = read_layers(model, class_names(no_split_module_classes), None)
    layers = replace(read, sizes=read.totals, ties=[])
    units, count = units_of(layers), len(layers.names)
    if count < num_processes:
        raise SettingsError(
            f"{type(model).__name__} has {count} layers that are not split, fewer than the {num_processes} "
            "processes: start fewer, or name fewer no_split_module_classes."
        )
    limits = (
        dict.fromkeys(range(num_processes), _ENDLESS) if max_memory is None else get_max_memory(max_memory)
    )
    rooms = [limits.get(process, 0) for process in range(num_processes)]
    bound = smallest_bound(units, rooms)
    if bound is None:
        raise SettingsError(
            f"max_memory={max_memory!r} cannot hold {type(model).__name__}, of {units.sums[-1]} bytes."
        )
    ends = fill(units, [min(bound, budget) for budget in rooms])
    # The last stages need a layer, too; taking one from an earlier stage makes no stage exceed the bound.
    ends = [min(end, count - num_processes + index + 1) for index, end in enumerate(ends)]
    return dict(merged(layers, devices_of(ends, count)))


def split_points_of(device_map: Mapping[str, int | str], num_processes: int) -> list[str]:
    """Return the name of the first module of every stage except the first stage.

    Example:
        >>> split_points_of({"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}, 2)
        ['blocks.1']
    """
    return [
        next(name for name, process in device_map.items() if process == stage)
        for stage in range(1, num_processes)
    ]


def check_device_map(model: nn.Module, device_map: Mapping[str, Device]) -> None:
    """Check that a map places every parameter and buffer of a model.

    Warns:
        UserWarning: The map names modules or tensors that the model lacks.

    Raises:
        SettingsError: It is not a mapping, a value is not a device, or tensors have no device; the message
            names them.

    Example:
        >>> from torch import nn
        >>> check_device_map(nn.Sequential(nn.Linear(2, 2)), {"0": "cpu"})
    """
    if not isinstance(device_map, Mapping):
        raise SettingsError(
            f"device_map is {reprlib.repr(device_map)}: pass a mapping of module names to devices, such as "
            "{'': 0}"
        )
    for name, device in device_map.items():
        if not isinstance(name, str):
            raise SettingsError(f"the device_map has the key {name!r}: keys are names of modules or tensors")
        try:
            if isinstance(device, bool) or not isinstance(device, int | str | torch.device):
                raise ValueError(device)
            if device != "disk":
                torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        except (RuntimeError, ValueError) as error:
            raise SettingsError(
                f"the device_map sends {some_of([name])!r} to {reprlib.repr(device)}, which is not a "
                "device: use 0, 'cpu' or 'disk'"
            ) from error
    known, stray = known_entries(model, device_map), ""
    if len(known) < len(device_map):
        stray = some_of([repr(name) for name in device_map if name not in known])
    names = dict(named_module_tensors(model, recurse=True))
    if unplaced := [name for name in names if device_of(name, device_map) is None]:
        also = f"names no part of {type(model).__name__}: {stray}, and " if stray else ""
        raise SettingsError(
            f"the device_map {also}has no device for {some_of(unplaced)}. Add them, or '' for the rest"
        )
    if stray:
        # Other programs filter this text.
        warnings.warn(
            "The following device_map keys do not match any submodules in the model: "
            f"[{stray}]. These entries have no effect.",
            stacklevel=3,
        )


def known_entries(model: nn.Module, device_map: Mapping[str, Device]) -> dict[str, Device]:
    """Drop the entries of a device map that match no module or tensor of a model.

    Example:
        >>> from torch import nn
        >>> known_entries(nn.Sequential(nn.Linear(2, 2)), {"0": "cpu", "1": 0})
        {'0': 'cpu'}
    """
    names = {
        *dict(model.named_modules(remove_duplicate=False)),
        *dict(model.named_parameters(remove_duplicate=False)),
        *dict(model.named_buffers(remove_duplicate=False)),
    }
    return {name: device for name, device in device_map.items() if name in names}


def flatten_map(model: nn.Module, device_map: Mapping[str, T]) -> dict[str, T]:
    """Replace entries that contain other entries by entries for the remaining modules and tensors.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        >>> flatten_map(model, {"": 0, "1.bias": "cpu"})
        {'0': 0, '1.weight': 0, '1.bias': 'cpu'}
    """
    above: set[str] = set()
    for name in device_map:
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            above.add(parent)
    return _flat_entries(model, "", None, device_map, above)


def _flat_entries(
    module: nn.Module, name: str, inherited: T | None, device_map: Mapping[str, T], above: set[str]
) -> dict[str, T]:
    target = device_map.get(name, inherited)
    if name not in above:
        return {} if target is None else {name: target}
    flat: dict[str, T] = {}
    prefix = f"{name}." if name else ""
    for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
        device = device_map.get(prefix + leaf, target)
        if device is not None and tensor is not None:
            flat[prefix + leaf] = device
    for leaf, child in module._modules.items():
        if child is not None:
            flat |= _flat_entries(child, prefix + leaf, target, device_map, above)
    return flat


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Iterable[str]], device_map: Mapping[str, Device]
) -> None:
    """Warn of tied weights that a map places on different devices: each device then holds a separate copy."""
    for group in tied_params:
        devices = {name: device_of(name, device_map) for name in group}
        if len(set(devices.values())) > 1:
            shown = some_of(f"{name} on {device}" for name, device in devices.items())
            _log.warning(
                "Tied weights are sent to different devices, where each has its own copy: %s.", shown
            )
