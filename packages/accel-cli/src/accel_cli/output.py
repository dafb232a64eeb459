"""What commands show: tables and lines, plain in a file or pipe, rich on a terminal."""

from __future__ import annotations

import contextlib
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TextIO

from accel_state.environ import read

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def show(*items: Table | str, stream: TextIO | None = None) -> None:
    """Write tables and lines to the standard output."""
    target = sys.stdout if stream is None else stream
    if is_rich(target, read()):
        import_module("accel_cli.rich_output").write(items, target)
        return
    target.write("\n".join(as_text(item) if isinstance(item, Table) else item for item in items) + "\n")


@contextmanager
def working(what: str) -> Generator[None]:
    """Show on a terminal that the command works, until the block ends; nothing in a file or pipe."""
    with contextlib.ExitStack() as stack:
        if is_rich(sys.stderr, read()):
            stack.enter_context(import_module("accel_cli.rich_output").spinner(what, sys.stderr))
        yield


def is_rich(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether a stream takes colours and frames; `NO_COLOR` and `TERM=dumb` refuse.

    Example:
        >>> import io
        >>> is_rich(io.StringIO(), {})
        False
    """
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def as_text(table: Table) -> str:
    r"""Write a table in columns.

    Example:
        >>> as_text(Table(head=("a", "b"), rows=(("1", "2"), ("long", "3"))))
        'a     b\n1     2\nlong  3'
    """
    lines: Sequence[tuple[str, ...]] = (table.head, *table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    body = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *body] if table.title else body)
