"""The subcommands and their flags as plain data, from the command's own parsers and settings table."""

from __future__ import annotations

from argparse import SUPPRESS
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.settings import OPTIONS

if TYPE_CHECKING:
    from argparse import Action
    from collections.abc import Mapping, Sequence

    from accel_cli.commands.arguments.parser import Parser


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A flag.

    Args:
        choices: The values, if there is a list; else files are completed.
    """

    names: tuple[str, ...]
    help: str = ""
    takes_value: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a subcommand.

    Args:
        choices: The values of its first argument, if there is a list; else files are completed.
    """

    help: str
    flags: tuple[Flag, ...] = ()
    choices: tuple[str, ...] = ()


HELP = Flag(names=("-h", "--help"), help="show the options")


def grammar(commands: Mapping[str, str], parsers: Mapping[str, Parser]) -> dict[str, Arguments]:
    """Collect the arguments of all subcommands.

    Example:
        >>> grammar({"env": "Tell."}, {})["env"].flags[0].names
        ('-h', '--help')
    """
    return {
        name: _of_launch(help_line)
        if name == "launch"
        else _of_parser(help_line, parsers[name])
        if name in parsers
        else Arguments(help=help_line, flags=(HELP,))
        for name, help_line in commands.items()
    }


def _of_parser(help_line: str, parser: Parser) -> Arguments:
    flags = [_flag(action) for action in parser.actions if action.option_strings and action.help != SUPPRESS]
    first = next((action for action in parser.actions if not action.option_strings), None)
    choices = () if first is None else tuple(map(str, first.choices or ()))
    return Arguments(help=help_line, flags=tuple(flags), choices=choices)


def _flag(action: Action) -> Flag:
    return Flag(
        names=tuple(action.option_strings),
        help=_line(action.help or ""),
        takes_value=action.nargs != 0,
        choices=tuple(map(str, action.choices or ())),
    )


def _of_launch(help_line: str) -> Arguments:
    config = Flag(names=("--config_file",), help="settings in YAML or JSON", takes_value=True)
    flags = [
        Flag(
            names=tuple(option.flags),
            help=_line(option.help),
            takes_value=option.const is None,
            choices=tuple(option.choices) if option.const is None else (),
        )
        for option in OPTIONS
        if option.flags
    ]
    return Arguments(help=help_line, flags=(HELP, config, *flags))


def _line(text: str) -> str:
    """Return the first sentence, without argparse's placeholders and shells' quotes."""
    words: Sequence[str] = text.replace("%(default)s", "").replace("`", "").replace("'", "").split()
    return " ".join(words).partition(". ")[0].removesuffix(".")
