"""Tables as HTML, for notebooks and reports; every cell is escaped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module


def html_table(rows: Iterable[Sequence[object]], *, head: Sequence[object] = (), title: str = "") -> str:
    """Write rows as an HTML table.

    Example:
        >>> html_table([("a", "<b>")], head=("name", "value"))
        '<table><thead><tr><th>name</th><th>value</th></tr></thead><tbody><tr><td>a</td><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    escape: Callable[[str], str] = import_module("html").escape  # its table of entities is large

    def row(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    caption = f"<caption>{escape(title)}</caption>" if title else ""
    top = f"<thead>{row(head, 'th')}</thead>" if head else ""
    return f"<table>{caption}{top}<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>"
