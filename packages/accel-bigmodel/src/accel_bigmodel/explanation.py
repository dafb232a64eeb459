"""Explain a device map as a table: `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from accel_bigmodel.device_map import check_device_map
from accel_bigmodel.sizes import byte_count
from accel_ops.weights.layout import convert_bytes
from accel_ops.weights.read import entry_of
from accel_state.frozen import frozen

if TYPE_CHECKING:
    import torch

    from accel_bigmodel.sizes import ElementType


_STORAGE = ("cpu", "disk")
_HEAD = ("device", "layers", "bytes", "share", "moved per forward", "entries")


@frozen
class DeviceUsage:
    """One row of an `Explanation`: the contents of a device.

    Attributes:
        device: An index or a name.
        entries: The entries of the map with this device, in order.
        nbytes: Bytes of their tensors; a tied tensor counts once.
        fraction: Their fraction of the model.
        moved: Bytes copied to the main device for each forward, as the device only stores them.
    """

    device: int | str | torch.device
    entries: tuple[str, ...]
    nbytes: int
    fraction: float
    moved: int


@frozen
class Explanation:
    """A device map with memory figures; it prints as a table.

    Attributes:
        rows: One for each device, in the order of the map.
        main: The device on which offloaded layers run.
        total: Bytes of the model.
    """

    rows: tuple[DeviceUsage, ...]
    main: int | str | torch.device
    total: int

    @property
    def moved(self) -> int:
        """Bytes copied to the main device for each forward."""
        return sum(row.moved for row in self.rows)

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [_HEAD]
        for row in self.rows:
            first, last = row.entries[0] or "the model", row.entries[-1]
            span = first if len(row.entries) == 1 else f"{first} … {last}"
            share, moved = f"{100 * row.fraction:.0f} %", convert_bytes(row.moved) if row.moved else "-"
            table.append(
                (str(row.device), str(len(row.entries)), convert_bytes(row.nbytes), share, moved, span)
            )
        table.append(("total", "", convert_bytes(self.total), "100 %", convert_bytes(self.moved), ""))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join(
            " ".join(f"{cell:{width + 1}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        )


def explain(
    device_map: Mapping[str, int | str | torch.device],
    model: nn.Module,
    *,
    dtype: ElementType | None = None,
) -> Explanation:
    """Explain a device map: the layers of each device, and the bytes copied in each forward.

    Args:
        device_map: Module or tensor name to device.
        model: The model, on any device, including the meta device.
        dtype: The dtype of floating-point weights once loaded.

    Raises:
        SettingsError: Tensors have no device in the map.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        >>> print(explain({"0": 0, "1": "disk"}, model))
        device  layers  bytes    share  moved per forward  entries
        0       1       1.06 KB  50 %   -                  0
        disk    1       1.06 KB  50 %   1.06 KB            1
        total           2.12 KB  100 %  1.06 KB
    """
    check_device_map(model, device_map)
    devices = list(dict.fromkeys(device_map.values()))
    main = next((device for device in devices if str(device) not in _STORAGE), "cpu")
    count = byte_count(dtype, None)
    held, moved = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0)
    seen: set[int] = set()
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        prefix, _, leaf = name.rpartition(".")
        size = tensor.nbytes if count is None else count(f"{prefix}." if prefix else "", leaf, tensor)
        entry = entry_of(name, device_map)
        if entry is None:
            continue
        device = device_map[entry]
        if (device == "disk" or (str(device) == "cpu" and str(main) != "cpu")) and isinstance(
            tensor, nn.Parameter
        ):
            moved[device] += size
        if id(tensor) not in seen:
            seen.add(id(tensor))
            held[device] += size
    total = sum(held.values())
    rows = tuple(
        DeviceUsage(
            device=device,
            entries=tuple(name for name, target in device_map.items() if target == device),
            nbytes=held[device],
            fraction=held[device] / total if total else 0.0,
            moved=moved[device],
        )
        for device in devices
    )
    return Explanation(rows=rows, main=main, total=total)
