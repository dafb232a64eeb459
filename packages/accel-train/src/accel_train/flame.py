"""Summarise a Chrome trace as a flame graph: one HTML file of plotly that opens offline."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CATEGORIES = frozenset({"cpu_op", "user_annotation", "python_function", "cuda_runtime"})
"""The categories of events that nest on a thread of the host."""
_LEAST = 0.001


@dataclass(slots=True)
class Frame:
    """A call path, over all its calls."""

    name: str
    microseconds: float = 0.0
    calls: int = 0
    children: dict[str, Frame] = field(default_factory=dict[str, "Frame"])


def read_frames(events: Iterable[dict[str, Any]]) -> Frame:
    """Nest the events of a trace by time, on each thread, and add up equal call paths.

    Example:
        >>> outer = {"ph": "X", "cat": "cpu_op", "name": "outer", "ts": 0, "dur": 10, "pid": 1, "tid": 1}
        >>> inner = {**outer, "name": "inner", "ts": 2, "dur": 4}
        >>> read_frames([inner, outer]).children["outer"].children["inner"].microseconds
        4.0
    """
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") in CATEGORIES]
    root = Frame("all threads")
    threads: dict[Any, list[tuple[float, Frame]]] = {}
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        open_frames = threads.setdefault((event["pid"], event["tid"]), [])
        while open_frames and open_frames[-1][0] <= event["ts"]:
            open_frames.pop()
        parent = open_frames[-1][1] if open_frames else root
        frame = parent.children.setdefault(event["name"], Frame(event["name"]))
        frame.microseconds += float(event["dur"])
        frame.calls += 1
        open_frames.append((event["ts"] + event["dur"], frame))
    root.microseconds = sum(frame.microseconds for frame in root.children.values())
    return root


def write_flame_graph(trace: Path, page: Path) -> None:
    """Write the flame graph of a trace."""
    from plotly.graph_objects import Figure, Icicle

    root = read_frames(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
    rows: list[tuple[str, str, Frame]] = []

    def shown(frame: Frame) -> list[Frame]:
        return [one for one in frame.children.values() if one.microseconds >= _LEAST * root.microseconds]

    def own(frame: Frame) -> float:
        return max(0.0, frame.microseconds - sum(child.microseconds for child in shown(frame)))

    def add(frame: Frame, path: str, parent: str) -> None:
        rows.append((path, parent, frame))
        for child in shown(frame):
            add(child, f"{path}\n{child.name}", path)

    add(root, root.name, "")
    figure = Figure(
        Icicle(
            ids=[path for path, _, _ in rows],
            parents=[parent for _, parent, _ in rows],
            labels=[frame.name for _, _, frame in rows],
            values=[own(frame) for _, _, frame in rows],
            customdata=[(frame.microseconds / 1000, frame.calls) for _, _, frame in rows],
            branchvalues="remainder",  # a parent's value is its own time: rounding cannot contradict it
            tiling={"orientation": "v"},
            hovertemplate="%{label}<br>%{customdata[0]:.3f} ms, %{customdata[1]} call(s)<extra></extra>",
        )
    )
    figure.update_layout(
        title=f"{trace.name}: time on the host by call; click to enlarge",
        margin={"t": 50, "l": 5, "r": 5, "b": 5},
    )
    figure.write_html(page, include_plotlyjs=True)
