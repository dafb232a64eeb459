"""Explain a device map, as a table, HTML or a plot: `explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from accel_bigmodel.device_map import check_device_map
from accel_bigmodel.placement import sites_of
from accel_bigmodel.sizes import byte_count
from accel_ops.weights.layout import convert_bytes
from accel_ops.weights.read import entry_of
from accel_state.frozen import frozen
from accel_state.html_table import html_table
from accel_state.libraries import require

if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from torch import nn

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
        entry_nbytes: Bytes of each entry; a tied tensor counts in the first.
    """

    device: int | str | torch.device
    entries: tuple[str, ...]
    nbytes: int
    fraction: float
    moved: int
    entry_nbytes: tuple[int, ...] = ()


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

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw a bar for each device, with a segment for each entry of the map.

        Args:
            path: File to write; its suffix selects matplotlib's format, such as `.svg`, `.png`, `.pdf`.

        Raises:
            MissingDependencyError: matplotlib is not installed.
        """
        require("matplotlib", "plot()", install="accel-bigmodel[plot]")
        figure = device_map_figure(self)
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


COLORS = {"cpu": ("#8fb996", "#b7d3bb"), "disk": ("#c9ada7", "#ddcbc7")}
"""Two shades for each device that only stores weights."""
ACCELERATOR = ("#5b8db8", "#8fb4d4")
_LABELLED = 0.05


def draw_device_map(explanation: Explanation, axes: Axes) -> None:
    """Draw an explanation onto matplotlib axes."""
    widest = max((row.nbytes for row in explanation.rows), default=0) or 1
    for height, row in enumerate(explanation.rows):
        left = 0
        shades = COLORS.get(str(row.device), ACCELERATOR)
        for index, (entry, size) in enumerate(zip(row.entries, row.entry_nbytes, strict=True)):
            name = str(row.device)
            axes.barh(name, size, left=left, color=shades[index % 2], edgecolor="white", linewidth=0.6)
            if size > _LABELLED * widest:
                short = entry if len(entry) < 200 * size / widest / 2 else entry.rpartition(".")[2]
                axes.text(left + size / 2, height, short or "model", ha="center", va="center", fontsize=7)
            left += size
        moved = f", {convert_bytes(row.moved)} moved per forward" if row.moved else ""
        label = f" {convert_bytes(row.nbytes)} ({row.fraction:.0%}){moved}"
        axes.text(left, height, label, ha="left", va="center", fontsize=8)
    axes.set_xlim(0, 1.45 * widest)
    axes.invert_yaxis()
    label_bytes(axes.xaxis, 1.45 * widest)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{convert_bytes(explanation.total)} by device and layer", loc="left", fontsize=10)


def label_bytes(axis: Axis, limit: float) -> None:
    """Label an axis in bytes with round numbers in a single unit."""
    from matplotlib.ticker import MaxNLocator

    name, unit = next(
        (
            (name, 1 << shift)
            for name, shift in (("TB", 40), ("GB", 30), ("MB", 20), ("KB", 10))
            if limit >= 1 << shift
        ),
        ("bytes", 1),
    )
    ticks = [value for value in MaxNLocator(7).tick_values(0, limit / unit) if value <= limit / unit]
    axis.set_ticks(
        [value * unit for value in ticks], [f"{value:g} {name}" if value else "0" for value in ticks]
    )


def device_map_figure(explanation: Explanation) -> Figure:
    """Draw an explanation as a new figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.5 * len(explanation.rows)), layout="constrained", facecolor="white")
    draw_device_map(explanation, figure.subplots())
    return figure
