"""Questions on a terminal, with arrows and suggestions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import questionary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from accel_cli.config.interview import Question


def ask(question: Question) -> str:
    """Ask on the terminal, until the answer can be used.

    Args:
        question: What to ask.

    Raises:
        KeyboardInterrupt: Somebody gives up.
    """
    return _WAYS[question.kind](question)


def agree(message: str, *, default: bool) -> bool:
    """Ask for yes or no.

    Raises:
        KeyboardInterrupt: Somebody gives up.
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
        return question.complaint(text) or True

    return str(questionary.text(question.message, default=question.default, validate=check).unsafe_ask())


_WAYS: Mapping[str, Callable[[Question], str]] = {"choice": _choice, "yes or no": _yes_or_no, "text": _text}
