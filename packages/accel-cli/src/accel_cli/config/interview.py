"""Which questions are asked, and what answers make. No terminal here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from accel_cli.config.defaults import CHOICE_TITLES, choices, suggestion
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, Given, Layer, Option, Settings, combine
from accel_state.settings.merge import parse
from accel_state.settings.model import value_at
from accel_state.settings.parsing import flag, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from accel_cli.config.host_info import HostInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question.

    Args:
        path: The setting that it is about.
        message: What is asked.
        kind: How it is answered: by a choice, by yes or no, or by a text.
        choices: Each choice and what it is called.
        default: The suggested answer; of yes or no `"true"` or `"false"`.
        complaint: Says what is wrong with a text; None if nothing is.
    """

    path: str
    message: str
    kind: Literal["choice", "yes or no", "text"]
    choices: tuple[tuple[str, str], ...]
    default: str
    complaint: Callable[[str], str | None]


class Asks(Protocol):
    """Whoever gives the answers."""

    def __call__(self, question: Question, /) -> str:
        """Answer with one of its choices, `"true"` or `"false"`, or a text without a complaint."""
        ...


def interview(ask: Asks, found: HostInfo) -> Settings:
    """Ask what matters for the answers so far.

    Args:
        ask: Gives the answers.
        found: This machine.

    Returns:
        What the answers make.
    """
    given: dict[str, Given] = {}
    for option in OPTIONS:
        settings = combine(given).settings

        def answers(path: str, settings: Settings = settings) -> object:
            return value_at(settings, path)

        if option.question is None or not (option.when is None or option.when(answers)):
            continue
        answer = read_answer(option, ask(question_about(option, found, answers)))
        if answer is not None:
            given[option.path] = answer
    return combine(given).settings


def question_about(option: Option, found: HostInfo, answers: Callable[[str], object]) -> Question:
    """The question of a row.

    Args:
        option: The row.
        found: This machine.
        answers: The answers so far.
    """
    offered = choices(option, answers)
    titles = CHOICE_TITLES.get(option.path, {})
    return Question(
        path=option.path,
        message=option.question or "",
        kind="choice" if offered else "yes or no" if option.parse is flag else "text",
        choices=tuple((choice, titles.get(choice, choice)) for choice in offered),
        default=suggestion(option, found, answers) or ("false" if option.parse is flag else ""),
        complaint=lambda text: _complaint(option, text),
    )


def read_answer(option: Option, text: str) -> Given | None:
    """Read an answer; None if it is empty.

    Raises:
        SettingsError: It cannot be used.
    """
    if option.shape == "list":
        found = words(text)
        return Given(value=found, layer=Layer.ARGUMENT, origin="answer") if found else None
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


def _complaint(option: Option, text: str) -> str | None:
    if not text.strip():
        return "This cannot be left out." if option.path in _REQUIRED else None
    try:
        read_answer(option, text)
    except SettingsError as error:
        return str(error).rpartition(": ")[2]
    return None
