"""The questions of `accel config`, and the settings of their answers; imports no terminal."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from accel_cli.config.defaults import CHOICE_TITLES, choices, suggestion
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, Layer, Option, Settings, SourcedValue, combine
from accel_state.settings.merge import parse
from accel_state.settings.model import BY_PATH, value_at
from accel_state.settings.parsing import boolean, comma_list

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from accel_cli.config.defaults import HostInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a setting.

    Args:
        choices: The choices, each with its title.
        default: The suggested answer; for yes or no `"true"` or `"false"`.
        find_problem: Returns the problem of a text answer; None if it is valid.
    """

    path: str
    message: str
    kind: Literal["choice", "yes or no", "text"]
    choices: tuple[tuple[str, str], ...]
    default: str
    find_problem: Callable[[str], str | None]


class Back(Exception):  # noqa: N818 - the user's wish, not an error
    """The user goes back to the question before."""


def interview(ask: Callable[[Question], str], found: HostInfo) -> Settings:
    """Ask the questions that depend on the answers so far.

    `ask` returns one of the choices, `"true"` or `"false"`, or a valid text, or raises `Back`.

    A question that is asked again, after the user went back, suggests the answer that it had.
    """
    answers: list[tuple[Option, str]] = []
    earlier: dict[str, str] = {}
    while (question := _next_question(answers, found, earlier)) is not None:
        try:
            text = ask(question)
        except Back:
            if answers:
                option, text = answers.pop()
                earlier[option.path] = text
            continue
        answers.append((BY_PATH[question.path], text))
    return _settings_of(answers)


def _next_question(
    answers: Sequence[tuple[Option, str]], found: HostInfo, earlier: Mapping[str, str]
) -> Question | None:
    """Return the first question after the last answer that applies; None if there is none."""
    settings = _settings_of(answers)

    def answer_to(path: str) -> object:
        return value_at(settings, path)

    rest = OPTIONS if not answers else OPTIONS[OPTIONS.index(answers[-1][0]) + 1 :]
    for option in rest:
        if option.question is not None and (option.ask_if is None or option.ask_if(answer_to)):
            question = question_about(option, found, answer_to)
            default = earlier.get(option.path, question.default)
            is_offered = not question.choices or default in dict(question.choices)
            return replace(question, default=default) if is_offered else question
    return None


def _settings_of(answers: Sequence[tuple[Option, str]]) -> Settings:
    read = {option.path: read_answer(option, text) for option, text in answers}
    return combine({path: value for path, value in read.items() if value is not None}).settings


def question_about(option: Option, found: HostInfo, answers: Callable[[str], object]) -> Question:
    """Return the question about a setting."""
    offered = choices(option, answers)
    titles = CHOICE_TITLES.get(option.path, {})
    return Question(
        path=option.path,
        message=option.question or "",
        kind="choice" if offered else "yes or no" if option.parse is boolean else "text",
        choices=tuple((choice, titles.get(choice, choice)) for choice in offered),
        default=suggestion(option, found, answers) or ("false" if option.parse is boolean else ""),
        find_problem=lambda text: _problem(option, text),
    )


def read_answer(option: Option, text: str) -> SourcedValue | None:
    """Parse an answer; None if it is empty."""
    if option.kind == "list":
        found = comma_list(text)
        return SourcedValue(value=found, layer=Layer.ARGUMENT, origin="answer") if found else None
    return parse(option, text.strip(), Layer.ARGUMENT, "answer")


_REQUIRED = [
    "launch.main_process_ip", "launch.main_process_port", "hosts.hostfile", "sagemaker.ec2_instance_type",
    "sagemaker.iam_role_name", "tpu.name", "tpu.zone",
]  # fmt: skip


def _problem(option: Option, text: str) -> str | None:
    if not text.strip():
        return "This answer is required." if option.path in _REQUIRED else None
    try:
        read_answer(option, text)
    except SettingsError as error:
        return str(error).rpartition(": ")[2]
    return None
