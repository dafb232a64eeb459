"""Draw a device map with matplotlib: a bar for each device, a segment for each entry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_ops.weights.sizes import convert_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from accel_bigmodel.explanation import Explanation

COLORS = {"cpu": ("#8fb996", "#b7d3bb"), "disk": ("#c9ada7", "#ddcbc7")}
"""Two shades for each place that only stores."""
ACCELERATOR = ("#5b8db8", "#8fb4d4")
_LABELLED = 0.05


def draw_device_map(explanation: Explanation, axes: Axes) -> None:
    """Draw onto axes."""
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
    """Label an axis of bytes with round numbers of one unit."""
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
    """Draw a figure of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.9 + 0.5 * len(explanation.rows)), layout="constrained", facecolor="white")
    draw_device_map(explanation, figure.subplots())
    return figure
