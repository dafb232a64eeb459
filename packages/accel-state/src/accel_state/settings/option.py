"""A row of the settings table, declared with the field that it sets."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from accel_state.settings.parsing import boolean, integer, one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Section = TypeVar("_Section")

Answers: TypeAlias = "Callable[[str], Any]"
"""Looks up the answer given so far for a settings path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting.

    Args:
        path: Its path in `Settings`, as `"section.field"`; a section alone for its switch.
        help: One sentence for the command's help and the reference page.
        topic: The heading under which help and reference show it.
        parse: Text to value; raises `ValueError` that says what was expected. None means "not given".
        choices: The texts that are allowed, as they are written; the empty tuple allows what `parse` does.
        variable: The environment variable; None for settings that only the command reads.
        flags: Command line flags, spelled with underscores.
        const: The value of a flag without an argument; None if the flag takes one.
        flag_aliases: Further flags without an argument, each with its value.
        kind: Its type in a file; a list becomes a tuple, and its flag may be repeated.
        key: The key of a config file; a dot leads into a nested table.
        key_aliases: Further spellings of the key that are read, and not written.
        launch_default: The value that `accel launch` passes to workers by default; None passes none.
        question: The question of `accel config`; None if it asks none.
        ask_if: Decides by the previous answers whether to ask.
        skip_reason: Why `accel config` does not ask.
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
    skip_reason: str | None = None

    @property
    def section(self) -> str:
        """The section of `Settings` that the path begins with."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The field of the section; empty for the switch of a section."""
        return self.path.partition(".")[2]

    @property
    def sources_help(self) -> str:
        """The variable and the key, for help: `"[VARIABLE; key table.key]"`; empty if there are none."""
        found = [source for source in (self.variable, self.key and f"key {self.key}") if source]
        return f"[{'; '.join(found)}]" if found else ""


def setting(
    derive: Callable[[str], Mapping[str, Any]] | None = None,
    *,
    default: Any = None,
    repr: bool = True,  # noqa: A002 - as of `dataclasses.field`
    **row: Any,
) -> Any:
    """Declare a field of a section with its row.

    What the row leaves out follows: a boolean field is parsed as one, and its flag takes no value if
    the field cannot be None; an integer is at least 1; `choices` are parsed in any case.

    Args:
        derive: Makes values of the row from the field's name; those in `row` win.
        default: The field's default.
        repr: Whether the field is shown.
        **row: Fields of `Option`, without `path` and `topic`.
    """
    metadata = {"row": lambda name: {**(derive(name) if derive else {}), **row}}
    return field(default=default, repr=repr, metadata=metadata)


def plain(help: str, **row: Any) -> Any:  # noqa: A002 - as the field is called
    """Declare a field that has its own name as variable, as flag and as key at the top of a file."""
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
    return tuple(_row_of(section, one, topic) for one in fields(kind))


def _row_of(section: str, one: Field[Any], topic: str) -> Option:
    row: dict[str, Any] = one.metadata["row"](one.name)
    implied: dict[str, Any] = {"parse": one_of(*row["choices"])} if "choices" in row else {}
    if str(one.type).startswith("bool"):
        implied = {"parse": boolean, "const": "true" if one.type == "bool" else None}
    elif str(one.type).startswith("int"):
        implied = {"parse": integer(1)}
    return Option(path=f"{section}.{one.name}", topic=topic, **{**implied, **row})


def switch(section: str, name: str, **row: Any) -> Option:
    """Make the row that turns on an optional section; `name` is that of its flag and variable."""
    variable, flags = f"ACCELERATE_USE_{name.upper()}", (f"--use_{name}",)
    return Option(path=section, parse=boolean, const="true", variable=variable, flags=flags, **row)


def documented(kind: type[_Section]) -> type[_Section]:
    """Decorate a section: its docstring lists the fields with the help of their rows."""
    lines = [f"    {row.path[1:]}: {row.help}" for row in rows_of("", kind, topic="")]
    kind.__doc__ = "\n".join([f"{kind.__doc__}", "", "Args:", *lines])
    return kind
