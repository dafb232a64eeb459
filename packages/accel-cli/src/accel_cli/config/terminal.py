"""Ask questions on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_cli.config.interview import Back

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import questionary
    from prompt_toolkit.key_binding import KeyPressEvent

    from accel_cli.config.interview import Question


def ask(question: Question) -> str:
    """Ask on the terminal until the answer is valid.

    Raises:
        Back: The user presses Esc.
        KeyboardInterrupt: The user presses Ctrl-C.
    """
    from prompt_toolkit.key_binding import KeyBindings, merge_key_bindings

    keys = KeyBindings()
    keys.add("escape", eager=True)(_go_back)
    prompt = _PROMPTS[question.kind](question)
    application = prompt.application
    application.key_bindings = merge_key_bindings([application.key_bindings or KeyBindings(), keys])
    answer: object = prompt.unsafe_ask()
    return str(answer).lower() if question.kind == "yes or no" else str(answer)


def agree(message: str, *, default: bool) -> bool:
    """Ask a yes-or-no question."""
    import questionary

    return bool(questionary.confirm(message, default=default).unsafe_ask())


def _go_back(event: KeyPressEvent) -> None:
    event.app.exit(exception=Back)


def _choice(question: Question) -> questionary.Question:
    import questionary

    offered = [questionary.Choice(title, value=value) for value, title in question.choices]
    default = next((one for one in offered if one.value == question.default), None)
    return questionary.select(question.message, offered, default=default)


def _yes_or_no(question: Question) -> questionary.Question:
    import questionary

    return questionary.confirm(question.message, default=question.default == "true")


def _text(question: Question) -> questionary.Question:
    import questionary

    def check(text: str) -> bool | str:
        return question.find_problem(text) or True

    return questionary.text(question.message, default=question.default, validate=check)


_PROMPTS: Mapping[str, Callable[[Question], questionary.Question]] = {
    "choice": _choice,
    "yes or no": _yes_or_no,
    "text": _text,
}
