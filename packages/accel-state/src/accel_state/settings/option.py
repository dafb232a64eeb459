"""`Option`, a row of the table of settings, and the parsers of its values."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import Field, field, fields
from typing import Any, Literal, TypeAlias, TypeVar

from accel_state.environ import str_to_bool
from accel_state.frozen import frozen


def boolean(text: str) -> bool:
    """Parse a boolean."""
    try:
        return bool(str_to_bool(text))
    except ValueError:
        raise ValueError("expected 'true' or 'false' (or yes/no, on/off, 1/0)") from None


def integer(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Create a parser of integers."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = None
        if number is None or not low <= number <= high:
            between = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"expected a whole number {between}")
        return number

    return parse


def number(low: float, high: float = math.inf, of: str = "") -> Callable[[str], float]:
    """Create a parser of finite numbers."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or math.isinf(value):
            between = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
            raise ValueError(f"expected a number{f' of {of}' if of else f' {between}'}")
        return value

    return parse


def one_of(*choices: str, numbered: bool = False) -> Callable[[str], str]:
    """Create a parser of one of some words, in any case or, if `numbered`, by its number from 1.

    Example:
        >>> one_of("FULL_SHARD", "NO_SHARD", numbered=True)("2")
        'NO_SHARD'
    """
    known = {choice.lower(): choice for choice in choices}
    if numbered:
        known |= {str(index): choice for index, choice in enumerate(choices, start=1)}

    def parse(text: str) -> str:
        try:
            return known[text.strip().lower()]
        except KeyError:
            raise ValueError(f"expected one of {', '.join(map(repr, choices))}") from None

    return parse


def optional(parse: Callable[[str], Any], *nothing: str) -> Callable[[str], Any]:
    """Create a parser that returns None for some words."""

    def read(text: str) -> Any:
        return None if text.strip().lower() in nothing else parse(text)

    return read


def comma_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def booleans(count: int) -> Callable[[str], tuple[bool, ...]]:
    """Create a parser of a comma-separated list of booleans, with or without brackets."""

    def parse(text: str) -> tuple[bool, ...]:
        parts = [part.strip() for part in text.strip("()[] ").split(",")]
        if len(parts) != count:
            raise ValueError(f"expected {count} of 'true' or 'false', with commas between")
        return tuple(boolean(part) for part in parts)

    return parse


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise ValueError("expected a table (in JSON on the command line)")
    return table


_Section = TypeVar("_Section")

Answers: TypeAlias = "Callable[[str], Any]"
"""Returns the current answer for a settings path."""


@frozen
class Option:
    """One setting.

    Args:
        path: Its path in `Settings`, as `"section.field"`; only the section for its switch.
        help: One sentence for the command's help and the reference page.
        topic: The heading under which help and reference show it.
        parse: Text to value; raises a `ValueError` that describes valid values. None means "unset".
        choices: The allowed texts, as they are written; the empty tuple leaves the check to `parse`.
        variable: The environment variable; None for settings that only the command reads.
        flags: Command line flags, spelled with underscores.
        const: The value of a flag without an argument; None if the flag takes one.
        flag_aliases: Further flags without an argument, each with its value.
        kind: Its type in a file; a list becomes a tuple, and its flag may be repeated.
        key: The key of a config file; a dot leads into a nested table.
        key_aliases: Further spellings of the key, which are read but not written.
        launch_default: The value that `accel launch` passes to workers by default; None passes none.
        question: The question of `accel config`, by default the help where there is an `ask_if`; None if
            there is none.
        ask_if: Decides by the previous answers whether to ask.
    """

    path: str
    help: str
    topic: str
    parse: Callable[[str], object] = str
    choices: tuple[str, ...] = ()
    variable: str | None = None
    flags: tuple[str, ...] = ()
    const: str | None = None
    flag_aliases: tuple[tuple[str, str], ...] = ()
    kind: Literal["word", "list", "table"] = "word"
    key: str | None = None
    key_aliases: tuple[str, ...] = ()
    launch_default: str | None = None
    question: str | None = None
    ask_if: Callable[[Answers], bool] | None = None

    @property
    def section(self) -> str:
        """The section of `Settings` at the start of the path."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The field of the section; empty for the switch of a section."""
        return self.path.partition(".")[2]

    @property
    def sources_help(self) -> str:
        """The variable and the key, for help: `"[VARIABLE; key table.key]"`; empty if there are none."""
        sources = [source for source in (self.variable, self.key and f"key {self.key}") if source]
        return f"[{'; '.join(sources)}]" if sources else ""


def setting(
    derive: Callable[[str], Mapping[str, Any]] | None = None,
    *,
    default: Any = None,
    repr: bool = True,  # noqa: A002 - as of `dataclasses.field`
    **row: Any,
) -> Any:
    """Declare a field of a section with its `Option`.

    Defaults of the row follow from the type: a boolean field is parsed as one, and its flag takes no value
    if the field cannot be None; an integer is at least 1; `choices` are parsed in any case.

    Args:
        derive: Creates values of the row from the field's name; those in `row` take precedence.
        default: The field's default.
        repr: Whether the field is shown.
        **row: Fields of `Option`, without `path` and `topic`.
    """
    metadata = {"row": lambda name: {**(derive(name) if derive else {}), **row}}
    return field(default=default, repr=repr, metadata=metadata)


def plain(help: str, **row: Any) -> Any:  # noqa: A002 - as the field is called
    """Declare a field whose name is also its variable, its flag and its top-level key of a file."""
    return setting(
        lambda name: {"variable": f"ACCELERATE_{name.upper()}", "flags": (f"--{name}",), "key": name},
        help=help,
        **row,
    )


def spelled(name: str, table: str, *, variable: str | None = None, **row: Any) -> dict[str, Any]:
    """Return the row of a setting that has one name as variable, as flag, and as key in a table."""
    return {"variable": variable or name.upper(), "flags": (f"--{name}",), "key": f"{table}.{name}", **row}


def rows_of(section: str, kind: type[Any], *, topic: str) -> tuple[Option, ...]:
    """Return the rows of a section, in the order of its fields."""
    return tuple(_row_of(section, item, topic) for item in fields(kind))


def _row_of(section: str, item: Field[Any], topic: str) -> Option:
    row: dict[str, Any] = item.metadata["row"](item.name)
    implied: dict[str, Any] = {"parse": one_of(*row["choices"])} if "choices" in row else {}
    if str(item.type).startswith("bool"):
        implied = {"parse": boolean, "const": "true" if item.type == "bool" else None}
    elif str(item.type).startswith("int"):
        implied = {"parse": integer(1)}
    if row.get("ask_if"):
        implied["question"] = f"{row['help'].removesuffix('.')}?"
    return Option(path=f"{section}.{item.name}", topic=topic, **{**implied, **row})


def switch(section: str, name: str, **row: Any) -> Option:
    """Create the row that turns on an optional section; `name` is the name of its flag and variable."""
    variable, flags = f"ACCELERATE_USE_{name.upper()}", (f"--use_{name}",)
    return Option(path=section, parse=boolean, const="true", variable=variable, flags=flags, **row)


def documented(kind: type[_Section]) -> type[_Section]:
    """Decorate a section: its docstring lists the fields with the help of their rows."""
    section: type[Any] = kind
    lines = [f"    {item.name}: {item.metadata['row'](item.name)['help']}" for item in fields(section)]
    kind.__doc__ = "\n".join([f"{kind.__doc__}", "", "Args:", *lines])
    return kind
