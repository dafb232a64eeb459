"""Draw the estimates of `accel estimate-memory` with matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_bigmodel.device_map_plot import draw_device_map, label_bytes
from accel_cli.commands.estimate.memory import ADAM, MASTER
from accel_ops.weights.sizes import convert_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from accel_bigmodel.explanation import Explanation
    from accel_cli.commands.estimate.memory import Estimate, Job

KINDS: tuple[str, ...] = ("parameters", "gradients", "optimizer", "communication", "working")
COLORS: dict[str, str] = dict(
    zip(KINDS, ("#5b8db8", "#e0a458", "#8fb996", "#b07aa1", "#c9ada7"), strict=True)
)


def draw(
    path: Path, estimates: Sequence[Estimate], job: Job, memory: int | None, placement: Explanation | None
) -> None:
    """Write a picture: memory by strategy; over the passes, if they are known; and the device map, if any."""
    from matplotlib.figure import Figure

    heights = [0.8 + 0.35 * len(estimates)]
    heights += [2.6] if job.moments else []
    heights += [0.8 + 0.4 * len(placement.rows)] if placement is not None else []
    figure = Figure(figsize=(9, sum(heights) + 0.4), layout="constrained", facecolor="white")
    rows = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _by_strategy(rows[0], estimates, memory)
    if job.moments:
        _over_passes(rows[1], job)
    if placement is not None:
        draw_device_map(placement, rows[-1])
        rows[-1].set_title(f"inference in float16: {rows[-1].get_title(loc='left')}", loc="left", fontsize=10)
    figure.savefig(path)


def _by_strategy(axes: Axes, estimates: Sequence[Estimate], memory: int | None) -> None:
    from matplotlib.patches import Patch

    for height, one in enumerate(estimates):
        left = 0
        for kind in KINDS:
            size = one.parts.get(kind, 0)
            axes.barh(one.strategy, size, left=left, color=COLORS[kind], edgecolor="white", linewidth=0.6)
            left += size
        host = f" (host: {convert_bytes(one.host)})" if one.host else ""
        axes.text(left, height, f" {convert_bytes(one.device)}{host}", va="center", fontsize=8)
    widest = max((one.device for one in estimates), default=1)
    limit = 1.3 * max(widest, memory or 0)
    axes.set_xlim(0, limit)
    if memory is not None:
        axes.axvline(memory, color="#b03a2e", linestyle="--", linewidth=1)
    handles = [Patch(color=COLORS[kind], label=kind) for kind in KINDS]
    axes.legend(handles=handles, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.invert_yaxis()
    label_bytes(axes.xaxis, limit)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    title = "memory of a device in training, by strategy"
    axes.set_title(title if memory is None else f"{title} (dashed: what there is)", loc="left", fontsize=10)


def _over_passes(axes: Axes, job: Job) -> None:
    """Draw the backward pass of one process: as gradients complete, activations are freed."""
    peaks: dict[int, tuple[int, int]] = {}
    for moment in job.moments:
        peaks[moment.gradients] = max(
            peaks.get(moment.gradients, (0, 0)), (moment.activations, moment.casts), key=sum
        )
    done = sorted(peaks)
    constant = MASTER * job.sizes.parameters
    layers = {
        "parameters": [constant for _ in done],
        "optimizer": [ADAM * job.sizes.trainable for _ in done],
        "gradients": [MASTER * elements for elements in done],
        "working": [sum(peaks[elements]) for elements in done],
    }
    shares = [elements / max(1, job.sizes.trainable) for elements in done]
    axes.stackplot(
        shares, *layers.values(), labels=[*layers], colors=[COLORS[kind] for kind in layers], step="post"
    )
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    label_bytes(axes.yaxis, axes.get_ylim()[1])
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        "one process in the backward pass, by the share of gradients that is complete",
        loc="left",
        fontsize=10,
    )
