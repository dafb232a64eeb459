"""Suggest the nearest known name in a message about an unknown one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar to another; `None` if none is similar.

    Example:
        >>> nearest("colour", ["color", "size"])
        'color'
    """
    return next(iter(get_close_matches(str(name), [*known], n=1, cutoff=cutoff)), None)


def did_you_mean(name: object, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """Return a sentence that suggests the nearest known name, or `otherwise` if none is near.

    Example:
        >>> did_you_mean("colour", ["color", "size"], "there are 'color' and 'size'.")
        "did you mean 'color'?"
    """
    near = nearest(name, known, cutoff=cutoff)
    return otherwise if near is None else f"did you mean {near!r}?"
