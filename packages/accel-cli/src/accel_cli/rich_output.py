"""The same output for a terminal, with frames and colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.live import Live

    from accel_cli.output import Table

STYLES: Mapping[str, str] = {
    "passed": "green",
    "fits": "green",
    "failed": "bold red",
    "too large": "red",
    "skipped": "yellow",
}
"""Cells that have a colour of their own."""


def write(items: Iterable[Table | str], stream: TextIO) -> None:
    """Write tables and lines."""
    from rich.console import Console
    from rich.table import Table as Frame
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for item in items:
        if isinstance(item, str):
            console.print(Text(item), soft_wrap=True)  # a command line is copied as it is
            continue
        frame = Frame(title=item.title or None, title_justify="left")
        for name in item.head:
            frame.add_column(name, overflow="fold")
        for row in item.rows:
            frame.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        console.print(frame)


def spinner(what: str, stream: TextIO) -> Live:
    """Return a context that shows a spinner, and removes it at its end."""
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    console = Console(file=stream)
    text = Text(f"{what} …")
    text.truncate(console.width - len("⠋ "), overflow="ellipsis")
    # The standard output may go elsewhere, and is left alone.
    return Live(Spinner("dots", text=text), console=console, transient=True, redirect_stdout=False)
