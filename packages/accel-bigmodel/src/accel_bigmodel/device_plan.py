"""Fill devices with the layers of a model: pure functions of sizes and budgets."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from itertools import accumulate
from typing import TYPE_CHECKING

from accel_state.frozen import frozen

if TYPE_CHECKING:
    import torch

    from accel_bigmodel.sizes import Layers


_ROUNDED_FROM = 1 << 20
_ROUNDED_TO = 2 << 20
"""Bytes; https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-memory-management"""


@frozen
class PlacementUnits:
    """Units of placement, as columns: a unit is a layer, or all layers that share a tied tensor.

    Units are ordered by their first layer.

    Attributes:
        sizes: Bytes, with tied tensors counted once.
        totals: Bytes of its largest layer.
        blocks: Bytes of the largest block that begins in it if its layers are offloaded.
        buffers: Bytes of buffers.
        members: The layers of each unit.
        sums: Running totals of `sizes`, from 0.
    """

    sizes: list[int]
    totals: list[int]
    blocks: list[int]
    buffers: list[int]
    members: list[tuple[int, ...]]
    sums: list[int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sums", list(accumulate(self.sizes, initial=0)))


def units_of(layers: Layers) -> PlacementUnits:
    """Merge layers that share tied tensors into units."""
    members = _groups(len(layers.sizes), layers.ties)

    def merge(combine: Callable[[Iterable[int]], int], column: Sequence[int]) -> list[int]:
        return [combine(column[layer] for layer in group) for group in members] if layers.ties else [*column]

    return PlacementUnits(
        sizes=merge(sum, layers.sizes),
        totals=merge(max, layers.totals),
        blocks=merge(max, layers.blocks or layers.totals),
        buffers=merge(sum, layers.buffers),
        members=members,
    )


def fill(units: PlacementUnits, capacities: Sequence[int]) -> list[int]:
    """Place units in order, each on the current device if it fits, else on the next one with room.

    Returns:
        The end of each device's run of units; units from the last end on did not fit.
    """
    ends: list[int] = []
    start = 0
    for capacity in capacities:
        start = max(start, bisect_right(units.sums, units.sums[start] + capacity) - 1)
        ends.append(start)
    return ends


@frozen
class DeviceBudgets:
    """The devices of a plan, in the order in which they are filled.

    Attributes:
        capacities: Bytes of each; units that fit on none go to the disk.
        executors: How many devices, from the first, execute their layers; the rest only store them.
        host: The index of the CPU if it only stores layers, else `None`.
        keep_buffers: Whether buffers of offloaded layers stay on the main device.
        streamed: How many offloaded blocks are on the main device at a time.
    """

    capacities: tuple[int, ...]
    executors: int
    host: int | None
    keep_buffers: bool
    streamed: int = 1


def assign_units(units: PlacementUnits, machine: DeviceBudgets) -> list[int]:
    """Assign units to devices so that offloaded layers have room to run.

    A model that fits on the first device is placed there, without a reserve. Otherwise the main device
    reserves memory for the offloaded blocks that are on it at a time, in their largest form (and for the
    buffers of all of them, if they are not offloaded), the CPU for the largest layer on the disk. If that
    would leave no layer on an accelerator, it reserves memory for one block: the next one then waits. A model
    that needs no offload is first tried with a reserve for its largest layer, so that small changes of a
    model do not move its layers to other devices.
    """
    count = len(units.sizes)
    if machine.executors and fill(units, machine.capacities[:1])[0] == count:
        return [count] * len(machine.capacities)
    largest = max(units.totals, default=0)
    steady = fill(units, _less(machine, largest, largest, main=0))
    if _end(steady, machine.executors) == count:
        return steady
    ends = _with_room(units, machine, machine.streamed)
    if machine.streamed > 1 and not _end(ends, machine.executors):
        return _with_room(units, machine, 1)
    return ends


def _with_room(units: PlacementUnits, machine: DeviceBudgets, blocks: int) -> list[int]:
    """Fill devices so that the main device reserves memory for a number of offloaded blocks."""
    ends, before = fill(units, machine.capacities), list[int]()
    # Reserving more offloads more: both only grow, until nothing changes.
    while ends != before:
        before = ends
        off_device, on_disk = _end(ends, machine.executors), _end(ends, len(ends))
        block = max(units.blocks[off_device:], default=0)
        if block >= _ROUNDED_FROM:  # CUDA's allocator rounds large blocks up
            block = -(-block // _ROUNDED_TO) * _ROUNDED_TO
        room = blocks * block
        room += sum(units.buffers[off_device:]) if machine.keep_buffers else 0
        # The first device with any layer executes the offloaded ones.
        main = next((device for device, end in enumerate(ends) if end), machine.executors - 1)
        ends = fill(units, _less(machine, room, max(units.totals[on_disk:], default=0), main=main))
    return ends


def devices_of(ends: Sequence[int], count: int) -> list[int]:
    """Convert the ends of runs to the device of each unit; `len(ends)` is the disk.

    Example:
        >>> devices_of([2, 2, 3], 4)
        [0, 0, 2, 3]
    """
    placed: list[int] = []
    for device, end in enumerate([*ends, count]):
        placed.extend([device] * (end - len(placed)))
    return placed


def _less(machine: DeviceBudgets, first: int, host: int, *, main: int) -> list[int]:
    """Subtract the reserves on every device up to the main one, and on the CPU if it only stores layers."""
    rooms = list(machine.capacities)
    for device in range(min(main + 1, machine.executors)):
        rooms[device] = max(0, rooms[device] - first)
    if machine.host is not None:
        rooms[machine.host] = max(0, rooms[machine.host] - host)
    return rooms


def _end(ends: Sequence[int], devices: int) -> int:
    return ends[devices - 1] if devices else 0


def _groups(count: int, ties: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    if not ties:
        return [(index,) for index in range(count)]
    parent = list(range(count))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for left, right in ties:
        low, high = sorted((root(left), root(right)))
        parent[high] = low
    groups: dict[int, list[int]] = {}
    for index in range(count):
        groups.setdefault(root(index), []).append(index)
    return [tuple(group) for group in groups.values()]


def clean_device_map(
    device_map: dict[str, int | str | torch.device], module_name: str = ""
) -> dict[str, int | str | torch.device]:
    """Merge, in place, the entries of each module that is entirely on one device into one entry.

    Args:
        device_map: Names of modules and tensors to devices.
        module_name: Merge only below this module; everywhere by default.

    Example:
        >>> clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": "cpu"})
        {'b.x': 0, 'b.y': 'cpu', 'a': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    names = [name for name in device_map if name.startswith(prefix)]
    devices = {device_map[name] for name in names}
    if len(devices) == 1 and len(names) > 1:
        for name in names:
            del device_map[name]
        device_map[module_name] = devices.pop()
        return device_map
    children = dict.fromkeys(name.removeprefix(prefix).partition(".")[0] for name in names)
    for child in children:
        if f"{prefix}{child}" not in device_map:
            clean_device_map(device_map, f"{prefix}{child}")
    return device_map


def assign_by_size(
    units: PlacementUnits, depths: Sequence[int], placed: Sequence[int], machine: DeviceBudgets
) -> list[int]:
    """Assign to each accelerator left empty the first layer, in breadth-first order, that fits.

    Example:
        >>> from accel_bigmodel.device_plan import DeviceBudgets, PlacementUnits
        >>> units = PlacementUnits(
        ...     sizes=[9, 2, 9],
        ...     totals=[9, 2, 9],
        ...     blocks=[9, 2, 9],
        ...     buffers=[0, 0, 0],
        ...     members=[(0,), (1,), (2,)],
        ... )
        >>> machine = DeviceBudgets(capacities=(12,), executors=1, host=None, keep_buffers=False)
        >>> assign_by_size(units, [0, 0, 0], [1, 1, 1], machine)
        [1, 0, 1]
    """
    result = list(placed)
    order = sorted(range(len(placed)), key=lambda index: (depths[index], index))
    for device in range(machine.executors):
        if any(result[index] == device and units.sizes[index] for index in order):
            continue
        off_device = [index for index in order if result[index] >= machine.executors and units.sizes[index]]
        for index in off_device:
            # The main device must still be able to run the largest offloaded layer.
            reserve = max((units.totals[other] for other in off_device if other != index), default=0)
            if units.sizes[index] + (reserve if device == 0 else 0) <= machine.capacities[device]:
                result[index] = device
                break
    return result
