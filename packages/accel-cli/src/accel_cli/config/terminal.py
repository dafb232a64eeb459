"""Ask questions on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import questionary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cli.config.interview import Question


def ask(question: Question) -> str:
    """Ask on the terminal until the answer is valid.

    Args:
        question: The question.

    Raises:
        KeyboardInterrupt: The user presses Ctrl-C.
    """
    return _PROMPTS[question.kind](question)


def agree(message: str, *, default: bool) -> bool:
    """Ask a yes-or-no question.

    Raises:
        KeyboardInterrupt: The user presses Ctrl-C.
    """
    return bool(questionary.confirm(message, default=default).unsafe_ask())


def _choice(question: Question) -> str:
    offered = [questionary.Choice(title, value=value) for value, title in question.choices]
    default = next((one for one in offered if one.value == question.default), None)
    return str(questionary.select(question.message, offered, default=default).unsafe_ask())


def _yes_or_no(question: Question) -> str:
    return str(agree(question.message, default=question.default == "true")).lower()


def _text(question: Question) -> str:
    def check(text: str) -> bool | str:
        return question.find_problem(text) or True

    return str(questionary.text(question.message, default=question.default, validate=check).unsafe_ask())


_PROMPTS: Mapping[str, Callable[[Question], str]] = {
    "choice": _choice,
    "yes or no": _yes_or_no,
    "text": _text,
}
