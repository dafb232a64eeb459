"""A report as one HTML file that opens offline: tables, and figures of plotly."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from accel_cli.output import Table
from accel_state.html_table import html_table

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from plotly.graph_objects import Figure

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
    """Write a report.

    Args:
        path: The file.
        title: Its title.
        items: Tables, figures and paragraphs, one below the other.
        problems: What is shown in red, above all else.
    """
    body = [f"<p class='problem'>{escape(problem)}</p>" for problem in problems]
    has_plotly = False
    for item in items:
        if isinstance(item, str):
            body.append(f"<p>{escape(item)}</p>")
        elif isinstance(item, Table):
            body.append(html_table(item.rows, head=item.head, title=item.title))
        else:  # the library goes into the file once, so that it opens without a network
            body.append(item.to_html(full_html=False, include_plotlyjs=not has_plotly))
            has_plotly = True
    meta = "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
    head = f"<head>{meta}<title>{escape(title)}</title><style>{_STYLE}</style></head>"
    content = f"<body><h1>{escape(title)}</h1>{''.join(body)}</body>"
    path.write_text(f"<!doctype html><html lang='en'>{head}{content}</html>\n", encoding="utf-8")
