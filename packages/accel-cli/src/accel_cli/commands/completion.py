"""`accel completion`: write the completion script of a shell to the standard output.

Subcommands, flags and values are read from the parsers.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Action, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from shlex import quote
from typing import TypeAlias

from accel_cli.arguments import Parser, SettingAction
from accel_cli.main import COMMANDS
from accel_state.frozen import frozen


def run(options: Namespace) -> int:
    """Write the completion script."""
    grammar = {name: read_parser(command.help, command.make_parser()) for name, command in COMMANDS.items()}
    sys.stdout.write(WRITERS[options.shell](grammar))
    return 0


def read_parser(help_line: str, parser: Parser) -> CommandFlags:
    """Collect the flags of a subcommand, except hidden ones, and the values of its first argument.

    Example:
        >>> read_parser("Tell.", Parser("env", "Tell.")).flags[0].names
        ('-h', '--help')
    """
    flags = [
        _read_flag(action) for action in parser.actions if action.option_strings and action.help != SUPPRESS
    ]
    first = next((action for action in parser.actions if not action.option_strings), None)
    choices = () if first is None else tuple(map(str, first.choices or ()))
    return CommandFlags(help=help_line, flags=tuple(flags), choices=choices)


def _read_flag(action: Action) -> Flag:
    choices = action.row.option.choices if isinstance(action, SettingAction) else action.choices
    # The first sentence, without argparse's placeholders and shell quotes.
    text = (action.help or "").replace("%(default)s", "").replace("%%", "%").replace("`", "").replace("'", "")
    return Flag(
        names=tuple(action.option_strings),
        help=" ".join(text.split()).partition(". ")[0].removesuffix("."),
        takes_value=action.nargs != 0,
        choices=tuple(map(str, choices or ())) if action.nargs != 0 else (),
    )


Grammar: TypeAlias = "Mapping[str, CommandFlags]"

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


@frozen
class Flag:
    """A flag.

    Args:
        choices: The allowed values, if they are listed; else files are completed.
    """

    names: tuple[str, ...]
    help: str = ""
    takes_value: bool = False
    choices: tuple[str, ...] = ()


@frozen
class CommandFlags:
    """The arguments of a subcommand.

    Args:
        choices: The values of its first argument, if there is a list; else files are completed.
    """

    help: str
    flags: tuple[Flag, ...] = ()
    choices: tuple[str, ...] = ()


def bash(grammar: Grammar) -> str:
    """Return the completion script for bash."""

    def spellings(command: CommandFlags) -> Iterator[str]:
        return (spelling for flag in command.flags for spelling in flag.names if spelling.startswith("--"))

    return _BASH.format(
        commands=" ".join(grammar),
        values="\n".join(
            f'            "{name} {spelling}") words="{" ".join(flag.choices)}" ;;'
            for name, flag, spelling in _iter_choices(grammar)
        ),
        flags="\n".join(
            f'                {name}) words="{" ".join(spellings(command))}" ;;'
            for name, command in grammar.items()
        ),
        choices="\n".join(
            f'                {name}) words="{" ".join(command.choices)}" ;;'
            for name, command in grammar.items()
            if command.choices
        ),
    )


def zsh(grammar: Grammar) -> str:
    """Return the completion script for zsh."""
    return _ZSH.format(
        commands=" ".join(_describe(name, command.help) for name, command in grammar.items()),
        values="\n".join(
            f"        ({quote(f'{name} {spelling}')}) compadd -- {_quote_all(flag.choices)}; return ;;"
            for name, flag, spelling in _iter_choices(grammar)
        ),
        flags="\n".join(
            f"            ({name}) words_to_offer=("
            + " ".join(_describe(spelling, flag.help) for flag in command.flags for spelling in flag.names)
            + ") ;;"
            for name, command in grammar.items()
        ),
        choices="\n".join(
            f"        ({name}) compadd -- {_quote_all(command.choices)}; return ;;"
            for name, command in grammar.items()
            if command.choices
        ),
    )


def fish(grammar: Grammar) -> str:
    """Return the completion script for fish."""
    lines = ["# Completion of `accel` for fish: ~/.config/fish/completions/accel.fish"]
    for name, command in grammar.items():
        lines.append(f"complete -c accel -f -n __fish_use_subcommand -a {name} -d {quote(command.help)}")
        condition = quote(f"__fish_seen_subcommand_from {name}")
        if command.choices:
            lines.append(f"complete -c accel -f -n {condition} -a {quote(' '.join(command.choices))}")
        for flag in command.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
            )
            value = f" -x -a {quote(' '.join(flag.choices))}" if flag.choices else " -r" * flag.takes_value
            lines.append(f"complete -c accel -n {condition} {names}{value} -d {quote(flag.help)}")
    return "\n".join(lines) + "\n"


WRITERS: Mapping[str, Callable[[Grammar], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
"""Writers by the name of the shell."""


def _iter_choices(grammar: Grammar) -> Iterator[tuple[str, Flag, str]]:
    for name, command in grammar.items():
        for flag in command.flags:
            if flag.takes_value and flag.choices:
                yield from ((name, flag, spelling) for spelling in flag.names)


def _describe(word: str, help_line: str) -> str:
    return quote(f"{word}:{help_line.replace(':', ' -')}")


def _quote_all(words: Iterable[str]) -> str:
    return " ".join(map(quote, words))
