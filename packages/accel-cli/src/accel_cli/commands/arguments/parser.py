"""Argument parser of subcommands: flags with dashes or underscores, errors as one sentence."""

from __future__ import annotations

from argparse import REMAINDER, Action, ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING, NoReturn

from accel_ops.weights.sizes import convert_file_size_to_int
from accel_state.did_you_mean import nearest
from accel_state.errors import SettingsError
from accel_state.settings.file import DEFAULT_PATH_HELP
from accel_state.settings.model import BY_PATH

if TYPE_CHECKING:
    from argparse import _ActionsContainer  # pyright: ignore[reportPrivateUsage] - groups have no public name
    from collections.abc import Sequence


class Parser(ArgumentParser):
    """The parser of a subcommand.

    Flags are declared with underscores and may be written with dashes.

    Example:
        >>> parser = Parser("greet", "Greet.")
        >>> _ = parser.add_argument("--first_name")
        >>> parser.read(["--first-name", "Ada"]).first_name
        'Ada'
    """

    def __init__(self, command: str, description: str, epilog: str | None = None) -> None:
        super().__init__(prog=f"accel {command}", description=description, epilog=epilog, allow_abbrev=False)

    @property
    def actions(self) -> list[Action]:
        """All declared actions, in order."""
        return [*self._actions]

    def read(self, words: Sequence[str]) -> Namespace:
        """Parse the arguments after the subcommand.

        Raises:
            SettingsError: An argument is unknown or invalid.
            SystemExit: Help was requested, and has been shown.
        """
        options, unknown = self.parse_known_args(self._spelled(words))
        if unknown:
            names = [word.partition("=")[0] for word in unknown if word.startswith("-")] or unknown
            raise SettingsError(*(f"argument {name} is unknown{self._nearest(name)}" for name in names))
        return options

    def error(self, message: str) -> NoReturn:
        """Raise a `SettingsError`, which the command prints as a sentence before it exits with code 2."""
        raise SettingsError(f"{message}.")

    def _spelled(self, words: Sequence[str]) -> list[str]:
        """Replace flags by their declared spelling, up to the script and its arguments."""
        spelled: list[str] = []
        values = 0
        script_follows = any(action.nargs == REMAINDER for action in self._actions)
        for position, word in enumerate(words):
            if values:
                values -= 1
                spelled.append(word)
                continue
            name, equals, value = word.partition("=")
            known = name if name in self._option_string_actions else f"--{name[2:].replace('-', '_')}"
            if word.startswith("--") and known in self._option_string_actions:
                action = self._option_string_actions[known]
                values = 1 if action.nargs is None and not equals else 0
                spelled.append(f"{known}{equals}{value}")
            elif script_follows and not word.startswith("-"):
                return [*spelled, *words[position:]]
            else:
                spelled.append(word)
        return spelled

    def _nearest(self, name: str) -> str:
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        by_spelling = {flag.replace("-", "_"): flag for flag in reversed(flags)}
        near = nearest(name.replace("-", "_"), by_spelling)
        return "." if near is None else f"; did you mean {by_spelling[near]}?"


def count(text: str) -> int:
    """Read a whole number of at least 1.

    Example:
        >>> count("8")
        8
    """
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value


def size(text: str) -> int:
    """Read bytes as people write them.

    Example:
        >>> size("1GB")
        1000000000
    """
    try:
        return convert_file_size_to_int(text)
    except SettingsError as error:
        raise ArgumentTypeError(str(error)) from None


def add_config_file(parser: _ActionsContainer, use: str) -> None:
    """Add the argument `--config_file`; its help says, with the verb `use`, what the command does with it."""
    parser.add_argument(
        "--config_file", metavar="FILE", help=f"the config file to {use}; by default {DEFAULT_PATH_HELP}"
    )


def setting(path: str, text: str) -> str:
    """Return the help text of a flag that is a setting, with its variable and key.

    Example:
        >>> setting("process.use_cpu", "use the CPU")
        'use the CPU [ACCELERATE_USE_CPU; key use_cpu]'
    """
    return f"{text} {BY_PATH[path].sources_help}"
