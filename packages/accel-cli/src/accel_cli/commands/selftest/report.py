"""`accel test --html`: seconds of each check and speeds, as figures of plotly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plotly.graph_objects import Bar, Figure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from accel_cli.commands.selftest.results import Outcome

_COLORS = {"passed": "#8fb996", "failed": "#b03a2e", "skipped": "#c9c9c9", "running": "#e0a458"}


def seconds_by_check(outcomes: Sequence[Outcome]) -> Figure:
    """Draw how long each check took, coloured by its result."""
    figure = Figure(
        Bar(
            y=[one.name for one in outcomes],
            x=[one.seconds for one in outcomes],
            text=[one.state for one in outcomes],
            marker={"color": [_COLORS[one.state] for one in outcomes]},
            orientation="h",
            hovertext=[one.detail for one in outcomes],
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="seconds")
    figure.update_layout(title="Checks", template="plotly_white", height=230 + 32 * len(outcomes))
    return figure


def speed_bars(speeds: Mapping[str, float]) -> Figure:
    """Draw how fast bytes were moved."""
    figure = Figure(
        Bar(
            y=[*speeds],
            x=[speed / 1e9 for speed in speeds.values()],
            text=[f"{speed / 1e9:.2f}" for speed in speeds.values()],
            marker={"color": "#5b8db8"},
            orientation="h",
        )
    )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="GB/s", rangemode="tozero")
    figure.update_layout(title="Speeds", template="plotly_white", height=230 + 32 * len(speeds))
    return figure
