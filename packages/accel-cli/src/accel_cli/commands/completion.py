"""`accel completion`: write the completion script of a shell to the standard output.

The commands, flags and values come from the parsers and the settings table.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from shlex import quote
from typing import TYPE_CHECKING

from accel_state.settings import OPTIONS

if TYPE_CHECKING:
    from accel_cli.arguments import Parser

    Grammar = Mapping[str, "CommandFlags"]

_BASH = """\
# Completion of `accel` for bash: eval "$(accel completion bash)"
_accel() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="${{COMP_WORDS[1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands} --help"
    else
        case "$command $previous" in
{values}
        esac
        if [ -z "$words" ] && [ "${{word:0:2}}" = "--" ]; then
            local body="${{word:2}}"
            word="--${{body//-/_}}"
            case "$command" in
{flags}
            esac
        elif [ -z "$words" ]; then
            case "$command" in
{choices}
            esac
        fi
    fi
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _accel accel
"""

_ZSH = """\
#compdef accel
# Completion of `accel` for zsh: eval "$(accel completion zsh)", after compinit
_accel() {{
    local -a words_to_offer
    if (( CURRENT == 2 )); then
        words_to_offer=({commands})
        _describe command words_to_offer
        return
    fi
    case "$words[2] $words[CURRENT-1]" in
{values}
    esac
    if [[ "$words[CURRENT]" == -* ]]; then
        case "$words[2]" in
{flags}
        esac
        _describe option words_to_offer
        return
    fi
    case "$words[2]" in
{choices}
    esac
    _files
}}
compdef _accel accel
"""


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
class CommandFlags:
    """The arguments of a subcommand.

    Args:
        choices: The values of its first argument, if there is a list; else files are completed.
    """

    help: str
    flags: tuple[Flag, ...] = ()
    choices: tuple[str, ...] = ()


HELP = Flag(names=("-h", "--help"), help="show the options")


def grammar(commands: Mapping[str, str], parsers: Mapping[str, Parser]) -> dict[str, CommandFlags]:
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
        else CommandFlags(help=help_line, flags=(HELP,))
        for name, help_line in commands.items()
    }


def _of_parser(help_line: str, parser: Parser) -> CommandFlags:
    flags = [_flag(action) for action in parser.actions if action.option_strings and action.help != SUPPRESS]
    first = next((action for action in parser.actions if not action.option_strings), None)
    choices = () if first is None else tuple(map(str, first.choices or ()))
    return CommandFlags(help=help_line, flags=tuple(flags), choices=choices)


def _flag(action: Action) -> Flag:
    return Flag(
        names=tuple(action.option_strings),
        help=_line(action.help or ""),
        takes_value=action.nargs != 0,
        choices=tuple(map(str, action.choices or ())),
    )


def _of_launch(help_line: str) -> CommandFlags:
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
    return CommandFlags(help=help_line, flags=(HELP, config, *flags))


def _line(text: str) -> str:
    """Return the first sentence, without argparse's placeholders and shells' quotes."""
    words: Sequence[str] = text.replace("%(default)s", "").replace("`", "").replace("'", "").split()
    return " ".join(words).partition(". ")[0].removesuffix(".")


def run(options: Namespace) -> int:
    """Write the completion script."""
    main = import_module("accel_cli.main")  # whose table names this module
    commands = {name: command.help for name, command in main.COMMANDS.items()}
    parsers = {name: command.make_parser() for name, command in main.COMMANDS.items() if command.parser}
    sys.stdout.write(WRITERS[options.shell](grammar(commands, parsers)))
    return 0


def bash(grammar: Grammar) -> str:
    """Return the completion script for bash."""
    return _BASH.format(
        commands=" ".join(grammar),
        values=_lines(
            f'            "{name} {spelling}") words="{" ".join(flag.choices)}" ;;'
            for name, flag, spelling in _with_choices(grammar)
        ),
        flags=_lines(
            f'                {name}) words="{" ".join(_long(words))}" ;;' for name, words in grammar.items()
        ),
        choices=_lines(
            f'                {name}) words="{" ".join(words.choices)}" ;;'
            for name, words in grammar.items()
            if words.choices
        ),
    )


def zsh(grammar: Grammar) -> str:
    """Return the completion script for zsh."""
    return _ZSH.format(
        commands=" ".join(_described(name, words.help) for name, words in grammar.items()),
        values=_lines(
            f"        ({quote(f'{name} {spelling}')}) compadd -- {_quoted(flag.choices)}; return ;;"
            for name, flag, spelling in _with_choices(grammar)
        ),
        flags=_lines(
            f"            ({name}) words_to_offer=("
            + " ".join(_described(spelling, flag.help) for flag in words.flags for spelling in flag.names)
            + ") ;;"
            for name, words in grammar.items()
        ),
        choices=_lines(
            f"        ({name}) compadd -- {_quoted(words.choices)}; return ;;"
            for name, words in grammar.items()
            if words.choices
        ),
    )


def fish(grammar: Grammar) -> str:
    """Return the completion script for fish."""
    lines = ["# Completion of `accel` for fish: ~/.config/fish/completions/accel.fish"]
    for name, words in grammar.items():
        lines.append(f"complete -c accel -f -n __fish_use_subcommand -a {name} -d {quote(words.help)}")
        condition = quote(f"__fish_seen_subcommand_from {name}")
        if words.choices:
            lines.append(f"complete -c accel -f -n {condition} -a {quote(' '.join(words.choices))}")
        for flag in words.flags:
            names = " ".join(
                f"-l {one[2:]}" if one.startswith("--") else f"-s {one[1:]}" for one in flag.names
            )
            value = f" -x -a {quote(' '.join(flag.choices))}" if flag.choices else " -r" * flag.takes_value
            lines.append(f"complete -c accel -n {condition} {names}{value} -d {quote(flag.help)}")
    return "\n".join(lines) + "\n"


WRITERS: Mapping[str, Callable[[Grammar], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
"""Writers by the name of the shell."""


def _with_choices(grammar: Grammar) -> Iterator[tuple[str, Flag, str]]:
    for name, words in grammar.items():
        for flag in words.flags:
            if flag.takes_value and flag.choices:
                yield from ((name, flag, spelling) for spelling in flag.names)


def _long(words: CommandFlags) -> Iterator[str]:
    return (spelling for flag in words.flags for spelling in flag.names if spelling.startswith("--"))


def _described(word: str, help_line: str) -> str:
    return quote(f"{word}:{help_line.replace(':', ' -')}")


def _quoted(words: Iterable[str]) -> str:
    return " ".join(map(quote, words))


def _lines(lines: Iterator[str]) -> str:
    return "\n".join(lines)
