"""A device map as a table."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from accel_bigmodel.device_map.check import check_device_map
from accel_bigmodel.placement import sites_of
from accel_bigmodel.sizes import byte_count
from accel_ops.weights.read import entry_of
from accel_ops.weights.sizes import convert_bytes
from accel_state.available import require
from accel_state.html_table import html_table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from matplotlib.figure import Figure
    from torch import nn

    from accel_bigmodel.sizes import ElementType

_STORAGE = ("cpu", "disk")
_HEAD = ("device", "layers", "bytes", "share", "moved per forward", "entries")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """One row: what a device holds.

    Attributes:
        device: An index or a name.
        entries: The entries of the map that it has, in order.
        nbytes: Bytes of their tensors, a tied tensor once.
        fraction: Their part of the model.
        moved: Bytes that come to the main device for each forward, since the device only stores them.
        entry_nbytes: Bytes of each entry, a tied tensor with the first.
    """

    device: int | str | torch.device
    entries: tuple[str, ...]
    nbytes: int
    fraction: float
    moved: int
    entry_nbytes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A device map with its numbers; printed, a table.

    Attributes:
        rows: One for each device, in the order of the map.
        main: Where offloaded layers run.
        total: Bytes of the model.
    """

    rows: tuple[DeviceUsage, ...]
    main: int | str | torch.device
    total: int

    @property
    def moved(self) -> int:
        """Bytes moved for each forward."""
        return sum(row.moved for row in self.rows)

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a bar for each device, with a segment for each entry of the map.

        Args:
            path: File to write, of a format that matplotlib knows by its suffix: `.svg`, `.png`, `.pdf`.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        require("matplotlib", "plot()", install="accel-bigmodel[plot]")
        figure: Figure = import_module("accel_bigmodel.device_map_plot").device_map_figure(self)
        if path is not None:
            figure.savefig(path)
        return figure

    def _repr_html_(self) -> str:
        return html_table(self._table()[1:], head=_HEAD)

    def _table(self) -> list[tuple[str, ...]]:
        total = ("total", "", convert_bytes(self.total), "100 %", convert_bytes(self.moved), "")
        return [_HEAD, *(self._cells(row) for row in self.rows), total]

    def __str__(self) -> str:
        table = self._table()
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table
        ]
        return "\n".join(line.rstrip() for line in lines)

    def _cells(self, row: DeviceUsage) -> tuple[str, ...]:
        first, last = row.entries[0] or "the model", row.entries[-1]
        span = first if len(row.entries) == 1 else f"{first} … {last}"
        moved = convert_bytes(row.moved) if row.moved else "-"
        return (
            str(row.device),
            str(len(row.entries)),
            convert_bytes(row.nbytes),
            f"{100 * row.fraction:.0f} %",
            moved,
            span,
        )


def explain(
    device_map: Mapping[str, int | str | torch.device],
    model: nn.Module,
    *,
    dtype: ElementType | None = None,
) -> Explanation:
    """Explain a device map: the layers of each device, and the bytes that each forward moves.

    Args:
        device_map: Module or tensor name to device.
        model: The model, on any device, the meta device too.
        dtype: The type that floating weights will have once loaded.

    Raises:
        SettingsError: The map leaves tensors without a device.

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
    by_entry = dict.fromkeys(device_map, 0)
    seen: set[int] = set()
    for name, site in sites_of(model).items():
        tensor = site.table[site.leaf]
        prefix, _, leaf = name.rpartition(".")
        size = tensor.nbytes if count is None else count(f"{prefix}." if prefix else "", leaf, tensor)
        entry = entry_of(name, device_map)
        if entry is None:
            continue
        device = device_map[entry]
        if (device == "disk" or (str(device) == "cpu" and str(main) != "cpu")) and not site.is_buffer:
            moved[device] += size
        if id(tensor) not in seen:
            seen.add(id(tensor))
            held[device] += size
            by_entry[entry] += size
    total = sum(held.values())
    rows = tuple(
        DeviceUsage(
            device=device,
            entries=tuple(name for name, target in device_map.items() if target == device),
            nbytes=held[device],
            fraction=held[device] / total if total else 0.0,
            moved=moved[device],
            entry_nbytes=tuple(by_entry[name] for name, target in device_map.items() if target == device),
        )
        for device in devices
    )
    return Explanation(rows=rows, main=main, total=total)
