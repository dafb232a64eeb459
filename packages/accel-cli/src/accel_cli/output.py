"""Output: rich tables on a terminal, plain text in a pipe, or a page; redaction of secrets."""

from __future__ import annotations

import re
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any, TextIO

from accel_state.environ import read
from accel_state.frozen import frozen
from accel_state.html_table import html_table


@frozen
class Table:
    """Rows of cells."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""


def show(*items: Table | str, stream: TextIO | None = None) -> None:
    """Write tables and lines to the standard output."""
    if not items:
        return
    target = sys.stdout if stream is None else stream
    if is_rich(target, read()):
        _write_rich(items, target)
        return
    target.write("\n".join(as_text(item) if isinstance(item, Table) else item for item in items) + "\n")


def write_html(path: str, title: str, items: Iterable[Table | str]) -> None:
    """Write tables and lines as a page that loads nothing else."""
    body = (
        html_table(item.rows, head=item.head, title=item.title)
        if isinstance(item, Table)
        else f"<p>{escape(item)}</p>"
        for item in items
    )
    style = "body { font: 15px sans-serif; margin: 2rem } th, td { padding: .2rem .8rem; text-align: left }"
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{style}</style>"
    page = f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{escape(title)}</h1>{''.join(body)}"
    Path(path).write_text(f"{page}</body></html>\n", encoding="utf-8")


@contextmanager
def working(what: str) -> Generator[None]:
    """Show a spinner on a terminal until the block ends; nothing in a file or pipe."""
    if not is_rich(sys.stderr, read()):
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    console = Console(file=sys.stderr)
    text = Text(f"{what} …")
    text.truncate(console.width - len("⠋ "), overflow="ellipsis")
    # The standard output may be a pipe or a file, and is not redirected.
    with Live(Spinner("dots", text=text), console=console, transient=True, redirect_stdout=False):
        yield


def is_rich(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether a stream shows colours and frames; no stream does with `NO_COLOR` or `TERM=dumb`."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


def first_line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def as_text(table: Table) -> str:
    """Return a table as aligned columns."""
    lines: Sequence[tuple[str, ...]] = (table.head, *table.rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.head))]
    body = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    return "\n".join([table.title, *body] if table.title else body)


def _write_rich(items: Iterable[Table | str], stream: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as Frame
    from rich.text import Text

    console = Console(file=stream, highlight=False)
    for item in items:
        if isinstance(item, str):
            console.print(Text(item), soft_wrap=True)  # Users copy command lines, which must not be wrapped.
            continue
        frame = Frame(title=item.title or None, title_justify="left")
        for name in item.head:
            frame.add_column(name, overflow="fold")
        for row in item.rows:
            frame.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
        console.print(frame)


STYLES: Mapping[str, str] = {
    "passed": "green",
    "fits": "green",
    "failed": "bold red",
    "too large": "red",
    "skipped": "yellow",
}
"""Colours by the text of a cell."""


def redact(name: str, value: Any) -> Any:
    """Return a value with its secrets replaced; they are detected by name or form.

    Example:
        >>> redact("WANDB_API_KEY", "0123"), redact("TOKENIZERS_PARALLELISM", "false")
        ('<redacted>', 'false')
        >>> redact("proxy", "http://ada:pass@proxy:80")
        'http://<redacted>@proxy:80'
    """
    if isinstance(value, dict):
        return {key: redact(str(key), item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact(name, item) for item in value]
    if not isinstance(value, str) or not value:
        return value
    if _SECRET_WORDS & set(re.split(r"[^a-z0-9]+", name.lower())):
        return REDACTED
    text = _IN_URL.sub(REDACTED, _SECRETS.sub(REDACTED, value))
    return _ASSIGNED.sub(rf"\g<1>{REDACTED}", text)


def redact_line(words: Sequence[str]) -> list[str]:
    """Return a command line with its secrets replaced, also those that are the value of a flag.

    Example:
        >>> redact_line(["train.py", "--hub_token", "abc", "--max_tokens", "512", "--api_key=0123"])
        ['train.py', '--hub_token', '<redacted>', '--max_tokens', '512', '--api_key=<redacted>']
    """
    shown: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        flag, equals, value = word.partition("=")
        if before.startswith("-") and "=" not in before and not word.startswith("-"):
            shown.append(word if word.isdecimal() else redact(before, word))
        elif equals and flag.startswith("-") and not value.isdecimal():
            shown.append(f"{flag}={redact(flag, value)}")
        else:
            shown.append(redact("", word))
    return shown


REDACTED = "<redacted>"
"""The replacement of a secret."""

_SECRET_WORDS = {
    *("token", "tokens", "secret", "secrets", "password", "passwd", "key", "keys", "apikey"),
    *("credential", "credentials", "auth", "cookie"),
}
"""Words of names, between underscores, dots or dashes, whose values are secrets."""

_SECRETS = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,}                           # Hugging Face
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                   # AWS
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_\w+ # GitHub
    | \bsk-[A-Za-z0-9_-]{16,}                         # several model providers
    | \beyJ[\w-]+\.[\w-]+\.[\w-]+                     # a JSON web token
    """,
    re.VERBOSE,
)

_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")

_ASSIGNED = re.compile(
    r"""(\b\w*(?:TOKEN|SECRET|PASSWORD|API_?KEY|ACCESS_KEY)\w*["']?\s*[=:]\s*["']?)([^\s,;"'}\]]+)""",
    re.IGNORECASE,
)
