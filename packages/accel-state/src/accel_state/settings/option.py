"""What one row of the table of settings says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

Answers: TypeAlias = "Callable[[str], Any]"
"""Tells the value that a path has so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One knob.

    Args:
        path: Where it is in `Settings`, as `"section.field"`; a section alone for its switch.
        help: One sentence for the command's help and the reference page.
        topic: The heading under which help and reference show it.
        parse: Text to value; raises `ValueError` that says what was expected. None means "not given".
        choices: The texts that are allowed, as they are written; the empty tuple allows what `parse` does.
        variable: The environment variable; None for what concerns only the command.
        flags: Command line flags, spelled with underscores.
        const: What a flag without a value stands for; None if the flag takes a value.
        more_flags: Further flags without a value, each with what it stands for.
        shape: What it is in a file; a list becomes a tuple, and its flag may be repeated.
        key: The key of a config file; a dot leads into a nested table.
        more_keys: Further spellings of the key that are read, and not written.
        launched: What `accel launch` hands over where nobody says anything; None hands over nothing.
        question: What the interactive configuration asks; None if it does not.
        when: Whether to ask, by the answers so far.
        unasked: Why it is not asked.
    """

    path: str
    help: str
    topic: str
    parse: Callable[[str], object] = str
    choices: tuple[str, ...] = ()
    variable: str | None = None
    flags: tuple[str, ...] = ()
    const: str | None = None
    more_flags: tuple[tuple[str, str], ...] = ()
    shape: Literal["word", "list", "table"] = "word"
    key: str | None = None
    more_keys: tuple[str, ...] = ()
    launched: str | None = None
    question: str | None = None
    when: Callable[[Answers], bool] | None = None
    unasked: str | None = None

    @property
    def section(self) -> str:
        """The section of `Settings` that holds it."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """Its name in that section; empty for the switch of a section."""
        return self.path.partition(".")[2]

    @property
    def places(self) -> str:
        """Where else it can be said, for help: `"[VARIABLE; key table.key]"`; empty if nowhere."""
        found = [place for place in (self.variable, self.key and f"key {self.key}") if place]
        return f"[{'; '.join(found)}]" if found else ""
