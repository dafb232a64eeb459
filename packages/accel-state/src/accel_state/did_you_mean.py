"""Suggest the nearest known name in a message about an unknown one."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], otherwise: str, *, cutoff: float = 0.6) -> str:
    """Return a sentence that suggests the nearest known name.

    Args:
        name: The unknown name.
        known: The known names.
        otherwise: The sentence to return if no known name is near.
        cutoff: The least similarity, as for `difflib.get_close_matches`.

    Example:
        >>> did_you_mean("colour", ["color", "size"], "there are 'color' and 'size'.")
        "did you mean 'color'?"
    """
    near = get_close_matches(str(name), [*known], n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else otherwise
