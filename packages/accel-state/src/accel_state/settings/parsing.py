"""Parsers of values: each takes a text and raises a `ValueError` that names what it expects."""

from __future__ import annotations

import json
import math
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from accel_state.environ import str_to_bool

if TYPE_CHECKING:
    from collections.abc import Callable


def boolean(text: str) -> bool:
    """Parse a boolean.

    Example:
        >>> boolean("Yes")
        True
    """
    try:
        return bool(str_to_bool(text))
    except ValueError:
        raise ValueError("expected 'true' or 'false' (or yes/no, on/off, 1/0)") from None


def integer(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Make a parser of integers.

    Example:
        >>> integer(1)("8")
        8
    """

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
    """Make a parser of finite numbers.

    Example:
        >>> number(0, 1)("0.5")
        0.5
    """

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


RECIPE_GROUP = "accel.recipes"
"""The entry-point group of precision recipes; a row is an `accel_plugins.recipe.RecipeSpec`."""


def one_of(*choices: str, numbered: bool = False) -> Callable[[str], str]:
    """Make the reader of a word, in any case or, if `numbered`, by its number from 1.

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


def precision(*choices: str) -> Callable[[str], str]:
    """Make the reader of a precision: one of some words, in any case, or the name of an installed recipe.

    Example:
        >>> precision("no", "bf16")("BF16")
        'bf16'
    """
    known = one_of(*choices)

    def parse(text: str) -> str:
        try:
            return known(text)
        except ValueError as error:
            recipes = sorted({point.name for point in entry_points(group=RECIPE_GROUP)})
            if text.strip() in recipes:
                return text.strip()
            more = f", or an installed recipe: {', '.join(map(repr, recipes))}" if recipes else ""
            raise ValueError(f"{error}{more}") from None

    return parse


def optional(parse: Callable[[str], Any], *nothing: str) -> Callable[[str], Any]:
    """Make a parser that returns None for some words.

    Example:
        >>> optional(integer(1), "-1")("-1") is None
        True
    """

    def read(text: str) -> Any:
        return None if text.strip().lower() in nothing else parse(text)

    return read


def comma_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list.

    Example:
        >>> comma_list("BertLayer, GPT2Block")
        ('BertLayer', 'GPT2Block')
    """
    return tuple(word.strip() for word in text.split(",") if word.strip())


def booleans(count: int) -> Callable[[str], tuple[bool, ...]]:
    """Make a parser of a comma-separated list of booleans, in brackets or not.

    Example:
        >>> booleans(3)("(False, true, no)")
        (False, True, False)
    """

    def parse(text: str) -> tuple[bool, ...]:
        parts = [part.strip() for part in text.strip("()[] ").split(",")]
        if len(parts) != count:
            raise ValueError(f"expected {count} of 'true' or 'false', with commas between")
        return tuple(boolean(part) for part in parts)

    return parse


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Example:
        >>> json_object('{"volume_size": 100}')
        {'volume_size': 100}
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("expected a table (in JSON on the command line)")
    return found
