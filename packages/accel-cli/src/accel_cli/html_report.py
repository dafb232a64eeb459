"""Write reports as self-contained HTML files: tables, paragraphs and plotly figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from accel_cli.output import Table
from accel_state.html_table import html_table

if TYPE_CHECKING:
    from accel_cli.commands.check.record import RankRecord
    from accel_cli.commands.estimate.memory import Estimate
    from accel_cli.commands.selftest import Outcome

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .8rem; text-align: left; vertical-align: top }
caption { text-align: left; font-weight: 600; white-space: nowrap }
.problem { color: #b03a2e; font-weight: 600 }
"""


def write_report(
    path: Path, title: str, items: Sequence[Table | Figure | str], problems: Sequence[str]
) -> None:
    """Write a report: the problems in red, then tables, figures and paragraphs, one below the other."""
    body = [f"<p class='problem'>{escape(problem)}</p>" for problem in problems]
    has_plotly = False
    for item in items:
        if isinstance(item, str):
            body.append(f"<p>{escape(item)}</p>")
        elif isinstance(item, Table):
            body.append(html_table(item.rows, head=item.head, title=item.title))
        else:  # The file embeds plotly's library once, so that it opens offline.
            body.append(item.to_html(full_html=False, include_plotlyjs=not has_plotly))
            has_plotly = True
    meta = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    head = f"<head>{meta}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    content = f"<body><h1>{escape(title)}</h1>{''.join(body)}</body>"
    path.write_text(f"<!doctype html><html lang='en'>{head}{content}</html>\n", encoding="utf-8")


_COLORS = ("#5b8db8", "#e0a458", "#8fb996", "#b07aa1", "#c9ada7", "#6d6875", "#457b9d", "#bc6c25")
_PROBLEM = "#b03a2e"
_GB = 1e9


def timeline(records: Sequence[RankRecord]) -> Figure:
    """Draw the collectives of each rank in order, with its memory at each collective.

    A red cross marks each call of a rank that differs from the first rank.
    """
    kinds = list(dict.fromkeys(event.kind for record in records for event in record.events))
    colors = {kind: _COLORS[index % len(_COLORS)] for index, kind in enumerate(kinds)}
    has_memory = any(event.nbytes for record in records for event in record.events)
    figure = make_subplots(rows=2 if has_memory else 1, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for record in records:
        figure.add_trace(_calls(record, records[0], colors), row=1, col=1)
        if has_memory:
            memory = Scatter(
                x=[*range(len(record.events))],
                y=[event.nbytes / _GB for event in record.events],
                mode="lines+markers",
                name=f"rank {record.rank}",
                line={"shape": "hv"},
            )
            figure.add_trace(memory, row=2, col=1)
    for kind, color in colors.items():  # The legend comes from traces without points.
        marker = {"color": color, "symbol": "square"}
        figure.add_trace(Scatter(x=[None], y=[None], mode="markers", name=kind, marker=marker))
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.update_xaxes(tickformat="d", nticks=8)
    if has_memory:
        figure.update_yaxes(title="GB at the call", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title="collectives in their order", row=2 if has_memory else 1, col=1)
    figure.update_layout(
        title="Collectives by rank",
        template="plotly_white",
        height=220 + 40 * len(records) + 220 * has_memory,
    )
    return figure


def _calls(record: RankRecord, first: RankRecord, colors: Mapping[str, str]) -> Scatter:
    """Draw the collectives of a rank, with red crosses from the first difference to the first rank on."""
    pairs = zip(record.events, first.events, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return Scatter(
        x=[*range(len(record.events))],
        y=[f"rank {record.rank}"] * len(record.events),
        mode="markers",
        marker={
            "size": 13,
            "color": [
                colors[event.kind] if index < same else _PROBLEM for index, event in enumerate(record.events)
            ],
            "symbol": ["square" if index < same else "x" for index in range(len(record.events))],
        },
        text=[f"{event.kind} at {event.where}" for event in record.events],
        hovertemplate="%{text}<extra>%{y}</extra>",
        showlegend=False,
    )


def memory_bars(estimates: Mapping[int, Estimate], memory: int | None) -> Figure:
    """Draw the peak of each rank by kind."""
    kinds = list(dict.fromkeys(kind for needed in estimates.values() for kind in needed.parts))
    ranks = [f"rank {rank}" for rank in estimates]
    bars = [
        Bar(
            y=ranks,
            x=[needed.parts.get(kind, 0) / _GB for needed in estimates.values()],
            name=kind,
            orientation="h",
            marker={"color": _COLORS[index % len(_COLORS)]},
        )
        for index, kind in enumerate(kinds)
    ]
    figure = _horizontal("Memory of a device at its peak", "GB", bars, 180 + 40 * len(ranks))
    figure.update_layout(barmode="stack")
    if memory is not None:
        figure.add_vline(x=memory / _GB, line={"color": _PROBLEM, "dash": "dash"})
    return figure


_STATES = {"passed": "#8fb996", "failed": "#b03a2e", "skipped": "#c9c9c9", "running": "#e0a458"}


def seconds_by_check(outcomes: Sequence[Outcome]) -> Figure:
    """Draw the duration of each check, coloured by its result."""
    bar = Bar(
        y=[outcome.name for outcome in outcomes],
        x=[outcome.seconds for outcome in outcomes],
        text=[outcome.state for outcome in outcomes],
        marker={"color": [_STATES[outcome.state] for outcome in outcomes]},
        orientation="h",
        hovertext=[outcome.detail for outcome in outcomes],
    )
    return _horizontal("Checks", "seconds", bar, 230 + 32 * len(outcomes))


def speed_bars(speeds: Mapping[str, float]) -> Figure:
    """Draw transfer speeds."""
    bar = Bar(
        y=[*speeds],
        x=[speed / _GB for speed in speeds.values()],
        text=[f"{speed / _GB:.2f}" for speed in speeds.values()],
        marker={"color": _COLORS[0]},
        orientation="h",
    )
    return _horizontal("Speeds", "GB/s", bar, 230 + 32 * len(speeds))


def _horizontal(title: str, unit: str, bars: Any, height: int) -> Figure:
    figure = Figure(bars)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title=unit, rangemode="tozero")
    figure.update_layout(title=title, template="plotly_white", height=height)
    return figure
