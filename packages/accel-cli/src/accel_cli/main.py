"""The `accel` command: a table of subcommands, each imported when it is chosen."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING

from accel_state.errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ERROR = 2
"""The exit code of a command line that cannot be carried out; nothing was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A subcommand.

    Args:
        target: `"module:function"`; the function takes the arguments after the subcommand and returns
            the exit code.
        help: One line for the overview.
    """

    target: str
    help: str


COMMANDS: Mapping[str, Command] = {
    "launch": Command(target="accel_cli.launch.command:run", help="Run a script in one process or in many."),
    "env": Command(
        target="accel_cli.env_report:run", help="Tell what a bug report should say about this machine."
    ),
}
"""The subcommands, in the order of the overview."""

# What the documentation names besides, so that asking for it gets a true answer.
_LATER = ("config", "estimate-memory", "merge-weights", "test", "to-fsdp2", "tpu-config")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: What follows `accel`; that of this process if None.

    Returns:
        The exit code. `accel launch` does not return when it starts a script: it becomes it.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given or given[0] in {"-h", "--help"}:
        sys.stdout.write(_overview())
        return 0 if given else ERROR
    name, *rest = given
    if name not in COMMANDS:
        return _fail("accel", _unknown(name))
    module, _, function = COMMANDS[name].target.partition(":")
    try:
        return getattr(import_module(module), function)(rest)
    except AccelError as error:
        return _fail(f"accel {name}", str(error))


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: accel <command> [options]",
            "",
            "Start and inspect PyTorch programs on any number of devices.",
            "",
            "commands:",
            *lines,
            "",
            "`accel <command> --help` tells the options of a command.",
            "",
        )
    )


def _unknown(name: str) -> str:
    if name in _LATER:
        return f"{name!r} is not available yet; there are {', '.join(COMMANDS)}."
    near = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}."
    return f"{name!r} is no command; {hint}"


def _fail(program: str, message: str) -> int:
    sys.stderr.write(f"{program}: error: {message}\n")
    return ERROR
