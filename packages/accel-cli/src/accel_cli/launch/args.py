"""Parse the command line of `accel launch`: flags up to the script, which has everything after it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from accel_state.did_you_mean import nearest
from accel_state.errors import SettingsError
from accel_state.settings import OPTIONS, ErrorCollector, Layer, Option, SourcedValue
from accel_state.settings.file import DEFAULT_PATH_HELP, concat
from accel_state.settings.merge import parse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

USAGE = "usage: accel launch [options] training_script [training_script_args ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """A parsed command line.

    Args:
        sourced: Path to value and origin, of every setting that has a flag there.
        config_file: The config file that is named; None for the default one.
        explain: Whether to tell what would be run, and run nothing.
        script: What to run; None if help was asked for.
        script_arguments: What follows it, untouched.
    """

    sourced: Mapping[str, SourcedValue]
    config_file: str | None = None
    explain: bool = False
    script: str | None
    script_arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Flag:
    """A flag; `const` is what it stands for if it takes no value, `option` is None for what is no setting."""

    option: Option | None
    const: str | None


_CONFIG_FILE, _EXPLAIN = "--config_file", "--explain"


def _flags() -> dict[str, _Flag]:
    flags = {_CONFIG_FILE: _Flag(option=None, const=None), _EXPLAIN: _Flag(option=None, const="true")}
    for option in OPTIONS:
        # A switch that a file can turn on has its opposite, so that an argument can overrule the file.
        if option.const == "true" and (option.key or not option.name):
            flags |= {f"--no_{name[2:]}": _Flag(option=option, const="false") for name in option.flags}
        flags |= {name: _Flag(option=option, const=option.const) for name in option.flags}
        flags |= {name: _Flag(option=option, const=const) for name, const in option.flag_aliases}
    return flags


FLAGS = _flags()
"""Every flag, spelled with underscores."""


def read_arguments(arguments: Sequence[str]) -> Arguments:
    """Read what follows `accel launch`: flags, the script, and its arguments.

    Raises:
        SettingsError: Flags are unknown, lack their values, or have some that cannot be used; the message
            names all. After an unknown flag that resembles none nobody knows where the script begins.

    Example:
        >>> read = read_arguments(["--num-processes", "2", "train.py", "--num-processes", "3"])
        >>> read.sourced["launch.num_processes"].value, read.script, read.script_arguments
        (2, 'train.py', ('--num-processes', '3'))
    """
    sourced: dict[str, SourcedValue] = {}
    others: dict[str, str] = {}
    rest = list(arguments)
    problems = ErrorCollector()
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        if word in {"-h", "--help"}:
            return Arguments(sourced={}, script=None, script_arguments=())
        name, text = _split(word)
        if (key := _key(name)) not in FLAGS:
            near = nearest(key, [flag for flag in FLAGS if flag.startswith("--")])
            hint = "." if near is None else f"; did you mean {near}?"
            problems.found.append(
                f"argument {name} is unknown{hint} Flags of the script come after the script."
            )
            if near is None:
                problems.raise_if_any()
            elif FLAGS[near].const is None and text is None:
                del rest[:1]
            continue
        with problems:
            flag = FLAGS[key]
            text = _text(name, flag, text, rest)
            if flag.option is None:
                others[key] = text
            elif (value := parse(flag.option, text, Layer.ARGUMENT, f"argument {name}")) is not None:
                sourced[flag.option.path] = concat(sourced.get(flag.option.path), value)
    if not rest and not problems.found:
        raise SettingsError(f"no script to run.\n{USAGE}")
    problems.raise_if_any()
    return Arguments(
        sourced=sourced,
        config_file=others.get(_CONFIG_FILE),
        explain=_EXPLAIN in others,
        script=rest[0],
        script_arguments=tuple(rest[1:]),
    )


def _key(name: str) -> str:
    return "--" + name[2:].replace("-", "_") if name.startswith("--") else name


def _split(word: str) -> tuple[str, str | None]:
    """Return the flag that a word holds, as it is written there, and the value joined to it."""
    name, equals, text = word.partition("=")
    if not name.startswith("--"):
        name, text, equals = (word[:2], word[2:], word[2:]) if len(word) > 2 else (word, "", "")
    return name, text if equals else None


def _text(name: str, flag: _Flag, text: str | None, rest: list[str]) -> str:
    """Return the value of a flag: what is joined to it, its constant, or the next word, which is consumed."""
    if flag.const is not None:
        if text is not None:
            raise SettingsError(f"argument {name} takes no value, but got {text!r}.")
        return flag.const
    if text is None and not rest:
        raise SettingsError(f"argument {name} needs a value.")
    return rest.pop(0) if text is None else text


def help_text() -> str:
    """Return the text of `accel launch --help`."""
    sections: dict[str, list[str]] = {
        "the command": [
            _entry(f"{_CONFIG_FILE} FILE", f"Settings in YAML or JSON; by default {DEFAULT_PATH_HELP}."),
            _entry(_EXPLAIN, "Tell where each setting comes from and what would be run, and run nothing."),
        ]
    }
    for option in OPTIONS:
        if option.flags:
            sections.setdefault(option.topic, []).append(_entry(_spelled(option), _details(option)))
    body = [line for title, entries in sections.items() for line in ("", f"{title}:", *entries)]
    return "\n".join((USAGE, "", *HELP, *body, ""))


HELP = textwrap.wrap(
    "Run a Python script in one process, with the semantics of `python script`, or in several. A setting is"
    " taken from its flag, else from its environment variable, else from the config file, else from its"
    " default. Flags may be spelled with dashes, too; a switch of a config file is turned off with"
    " `--no_` before its name. What follows the script is the script's.",
    width=100,
)
"""What the command does, in lines."""


def _spelled(option: Option) -> str:
    names = ", ".join((*option.flags, *(name for name, _ in option.flag_aliases)))
    if option.const is not None:
        return names
    few = 0 < len(option.choices) < 5
    return f"{names} {{{','.join(option.choices)}}}" if few else f"{names} {option.name.upper()}"


def _details(option: Option) -> str:
    choices = (
        f" One of {', '.join(option.choices)}." if len(option.choices) > 4 and option.const is None else ""
    )
    default = f" With --use_{option.section}: {option.launch_default}." if option.launch_default else ""
    return f"{option.help}{choices}{default} {option.sources_help}".rstrip()


def _entry(names: str, text: str) -> str:
    lines = textwrap.wrap(text, width=76, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join((f"  {names}", *lines))
