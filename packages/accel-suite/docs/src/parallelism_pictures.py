# ruff: noqa: INP001 - a script
"""Draw what each of two devices holds and reads along every axis, for guides/parallelism.md.

uv run python packages/accel-suite/docs/src/parallelism_pictures.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes

    Held = Callable[[int, int, int], bool]

PICTURES = Path(__file__).resolve().parents[1] / "pictures"
COLORS, EMPTY, LINE = ("#2f6fb0", "#e08a2e"), "#f1f3f5", "#9aa5b1"
SIZE = 4
"""Layers of the model, parts of a layer, samples of a batch and tokens of a sample."""


def everything(_device: int, _row: int, _column: int) -> bool:
    """Both devices have all."""
    return True


def by_row(device: int, row: int, _column: int) -> bool:
    """A device has half of the rows."""
    return row // 2 == device


def by_column(device: int, _row: int, column: int) -> bool:
    """A device has half of the columns."""
    return column // 2 == device


def experts(device: int, row: int, column: int) -> bool:
    """A device has half of the experts, which every second layer consists of, and a shard of the others."""
    return column // 2 == device if row % 2 else column % 2 == device


def shards(device: int, _row: int, column: int) -> bool:
    """A device has a shard of each parameter."""
    return column % 2 == device


AXES: dict[str, tuple[Held, Held]] = {
    "dp_replicate": (everything, by_row),
    "dp_shard": (shards, by_row),
    "tp": (by_column, everything),
    "cp": (shards, by_column),
    "sp": (shards, by_column),
    "ep": (experts, by_row),
    "pp": (by_row, everything),
}
"""Axis to what a device has of the model (layers by parts) and of the batch (samples by tokens)."""


def draw(axis: str, path: Path) -> None:
    """Write the picture of an axis."""
    model, batch = AXES[axis]
    figure = Figure(figsize=(7.2, 1.75), layout="constrained", facecolor="white")
    panels = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1])
    for device in range(2):
        _grid(panels[2 * device], model, device, f"device {device}: model", "layers")
        _grid(panels[2 * device + 1], batch, device, f"device {device}: batch", "samples")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})


def _grid(panel: Axes, held: Held, device: int, title: str, rows: str) -> None:
    for row in range(SIZE):
        for column in range(SIZE):
            color = COLORS[device] if held(device, row, column) else EMPTY
            place = (column, SIZE - 1 - row)
            panel.add_patch(Rectangle(place, 1, 1, facecolor=color, edgecolor="white", linewidth=1.5))
    panel.set_xlim(0, SIZE)
    panel.set_ylim(0, SIZE)
    panel.set_aspect("equal")
    panel.set_title(title, fontsize=9)
    panel.set_ylabel(rows, fontsize=8)
    panel.set_xlabel("parts of a layer" if rows == "layers" else "tokens", fontsize=8)
    panel.set_xticks([])
    panel.set_yticks([])
    for side in panel.spines.values():
        side.set_color(LINE)


def main() -> None:
    """Draw all."""
    for axis in AXES:
        draw(axis, PICTURES / f"axis_{axis}.svg")


if __name__ == "__main__":
    main()
