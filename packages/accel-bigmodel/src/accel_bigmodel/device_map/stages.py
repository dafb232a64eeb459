"""Split the layers of a model into pipeline stages: contiguous, and as evenly as possible."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from accel_bigmodel.device_map.budget import smallest_bound
from accel_bigmodel.device_map.infer import infer_auto_device_map, merged
from accel_bigmodel.device_map.plan import devices_of, fill, units_of
from accel_bigmodel.layers import class_names, read_layers
from accel_ops.weights.sizes import convert_file_size_to_int
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

_ENDLESS = 1 << 62  # bytes


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: str | Sequence[str] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
) -> dict[str, int | str]:
    """Assign the layers of a model to pipeline stages, so that the largest stage is as small as possible.

    Every process gets at least one layer. A tied weight is counted with every layer that has it, since every
    stage needs its own.

    Args:
        model: The model, on any device, the meta device too. Its layers run in the order of registration.
        num_processes: Number of stages; with 1, the ordinary device map.
        no_split_module_classes: Names of classes whose modules stay whole.
        max_memory: What each process may take; no limit by default.

    Returns:
        Module name to the index of a process.

    Raises:
        SettingsError: There are fewer layers than processes, or `max_memory` cannot hold the model.

    Example:
        >>> from torch import nn
        >>> generate_device_map(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), 2)
        {'0': 0, '1': 0, '2': 1}
    """
    if num_processes == 1:
        return infer_auto_device_map(model, max_memory, no_split_module_classes, clean_result=False)
    found = read_layers(model, class_names(no_split_module_classes), None)
    layers = replace(found, sizes=found.totals, ties=[])
    units, count = units_of(layers), len(layers.names)
    if count < num_processes:
        raise SettingsError(
            f"{type(model).__name__} has {count} layers that are not split, fewer than the {num_processes} "
            "processes: start fewer, or name fewer no_split_module_classes."
        )
    rooms = [_budget(max_memory, process) for process in range(num_processes)]
    bound = smallest_bound(units, rooms)
    if bound is None:
        raise SettingsError(
            f"max_memory={max_memory!r} cannot hold {type(model).__name__}, of {units.sums[-1]} bytes."
        )
    ends = fill(units, [min(bound, budget) for budget in rooms])
    # Whoever comes last has a layer too; giving one away makes no share larger.
    ends = [min(end, count - num_processes + index + 1) for index, end in enumerate(ends)]
    return dict(merged(layers, devices_of(ends, count)))


def split_points_of(device_map: Mapping[str, int | str], num_processes: int) -> list[str]:
    """Return the first module of every stage but the first.

    Example:
        >>> split_points_of({"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 1}, 2)
        ['blocks.1']
    """
    return [
        next(name for name, process in device_map.items() if process == stage)
        for stage in range(1, num_processes)
    ]


def _budget(max_memory: Mapping[int | str, float | str] | None, process: int) -> int:
    if max_memory is None:
        return _ENDLESS
    return convert_file_size_to_int(max_memory.get(process, max_memory.get(str(process), 0)))
