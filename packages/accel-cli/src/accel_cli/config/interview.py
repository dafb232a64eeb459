"""The questions of `accel config`, and the settings of their answers; imports no terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from accel_cli.config.defaults import CHOICE_TITLES, choices, suggestion
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, Layer, Option, Settings, SourcedValue, combine
from accel_state.settings.merge import parse
from accel_state.settings.model import value_at
from accel_state.settings.parsing import boolean, comma_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cli.config.host_info import HostInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about a setting.

    Args:
        path: Path of the setting.
        message: The question.
        kind: Kind of the answer.
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


class Prompter(Protocol):
    """A function that answers questions."""

    def __call__(self, question: Question, /) -> str:
        """Return one of the choices, `"true"` or `"false"`, or a valid text."""
        ...


def interview(ask: Prompter, found: HostInfo) -> Settings:
    """Ask the questions that depend on the answers so far.

    Args:
        ask: Answers a question.
        found: This host.

    Returns:
        The settings of the answers.
    """
    answered: dict[str, SourcedValue] = {}
    for option in OPTIONS:
        settings = combine(answered).settings

        def answers(path: str, settings: Settings = settings) -> object:
            return value_at(settings, path)

        if option.question is None or not (option.ask_if is None or option.ask_if(answers)):
            continue
        answer = read_answer(option, ask(question_about(option, found, answers)))
        if answer is not None:
            answered[option.path] = answer
    return combine(answered).settings


def question_about(option: Option, found: HostInfo, answers: Callable[[str], object]) -> Question:
    """Return the question about a setting.

    Args:
        option: The row of the setting.
        found: This host.
        answers: The answers so far.
    """
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
    """Parse an answer; None if it is empty.

    Raises:
        SettingsError: The answer is not valid.
    """
    if option.kind == "list":
        found = comma_list(text)
        return SourcedValue(value=found, layer=Layer.ARGUMENT, origin="answer") if found else None
    return parse(option, text.strip(), Layer.ARGUMENT, "answer")


_REQUIRED = (
    "launch.main_process_ip",
    "launch.main_process_port",
    "hosts.hostfile",
    "sagemaker.ec2_instance_type",
    "sagemaker.iam_role_name",
    "tpu.name",
    "tpu.zone",
)


def _problem(option: Option, text: str) -> str | None:
    if not text.strip():
        return "This answer is required." if option.path in _REQUIRED else None
    try:
        read_answer(option, text)
    except SettingsError as error:
        return str(error).rpartition(": ")[2]
    return None
