"""When the next layer fits on no accelerator that is still empty: place another layer that does."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accel_bigmodel.device_map.plan import Machine, Units


def assign_by_size(units: Units, depths: Sequence[int], placed: Sequence[int], machine: Machine) -> list[int]:
    """Give accelerators that a plan left empty the first layer, in breadth-first order, that fits.

    Example:
        >>> from accel_bigmodel.device_map.plan import Machine, Units
        >>> units = Units(
        ...     sizes=[9, 2, 9],
        ...     totals=[9, 2, 9],
        ...     blocks=[9, 2, 9],
        ...     disk_blocks=[9, 2, 9],
        ...     buffers=[0, 0, 0],
        ...     caches=[0, 0, 0],
        ...     actives=[],
        ...     members=[(0,), (1,), (2,)],
        ... )
        >>> machine = Machine(capacities=(12,), executors=1, host=None, keep_buffers=False)
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
            # The main device must still be able to run the largest of those that stay away.
            reserve = max((units.totals[other] for other in off_device if other != index), default=0)
            active = units.actives[index] if units.actives else 0
            if units.sizes[index] + max(active, reserve if device == 0 else 0) <= machine.capacities[device]:
                result[index] = device
                break
    return result
