"""The `accel` command: the table of subcommands, each imported when it is chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING, Any, NamedTuple

from accel_cli.output import working
from accel_state.errors import AccelError, did_you_mean

if TYPE_CHECKING:
    from accel_cli.arguments import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `accel`; None for the arguments of this process.

    Returns:
        The exit code. `accel launch` does not return when it starts a script: its process becomes the script.
    """
    argv = sys.argv[1:] if arguments is None else list(arguments)
    if not argv or argv[0] in {"-h", "--help"}:
        sys.stdout.write(_overview())
        return 0
    if argv[0] in {"-V", "--version"}:
        sys.stdout.write(f"accel {version('accel-cli')}\n")
        return 0
    name, *words = argv
    try:
        command = COMMANDS.get(name) or installed_commands().get(name)
        if command is None:
            known = (*COMMANDS, *installed_commands())
            hint = did_you_mean(name, known, f"there are {', '.join(known)}.")
            return _fail("accel", f"{name!r} is not a command; {hint}")
        return command(words)
    except AccelError as error:
        return _fail(f"accel {name}", str(error))
    except (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError) as error:
        if error.filename is None:
            raise
        return _fail(f"accel {name}", f"{error.filename!r}: {error.strerror}.")
    except KeyboardInterrupt:
        return INTERRUPTED


def run(name: str) -> int:
    """Run a subcommand with the arguments of this process."""
    return main([name, *sys.argv[1:]])


def installed_commands() -> dict[str, Callable[[Sequence[str]], int]]:
    """Return the subcommands of other distributions, from the entry-point group `accel.commands`.

    Each takes the words after its name and returns the exit code.
    """
    return {point.name: point.load() for point in entry_points(group="accel.commands")}


def _overview() -> str:
    commands = {**COMMANDS, **installed_commands()}
    width = max(map(len, commands))
    lines = ""
    for name, command in commands.items():
        text = command.help if isinstance(command, Subcommand) else command.__doc__ or ""
        lines += f"  {name:<{width}}  {text.partition(chr(10))[0]}\n"
    return (
        "usage: accel <command> [options]; accel --version\n\n"
        "Launch and inspect PyTorch programs on any number of devices.\n\n"
        f"commands:\n{lines}\n`accel <command> --help` lists the options of a command.\n"
    )


def _fail(program: str, message: str) -> int:
    sys.stderr.write(f"{program}: error: {message}\n")
    return ERROR


ERROR = 2
"""The exit code of an invalid command line, for which nothing was started."""

INTERRUPTED = 130
"""The exit code after Ctrl-C, as in a shell."""

config, estimate_memory, launch, merge_weights = (
    partial(run, name) for name in ("config", "estimate-memory", "launch", "merge-weights")
)
"""The entry points of the programs `accel-config`, `accel-estimate-memory` and so on."""


class Subcommand(NamedTuple):
    """A subcommand.

    Args:
        target: The module with a function `run`, or the `"module:function"`, which takes the parsed namespace
            and returns the exit code.
        help: A line for the overview.
        parser: The function that creates the parser, in `accel_cli.arguments` or as `"module:function"`, so
            that help and errors of the command line do not import the target.
        imports_torch: Whether the target imports torch, which takes seconds.
    """

    target: str
    help: str
    parser: str
    imports_torch: bool = False

    def make_parser(self) -> Parser:
        """Create the parser."""
        module, _, function = self.parser.rpartition(":")
        return getattr(import_module(module or "accel_cli.arguments"), function)()

    def __call__(self, words: Sequence[str]) -> int:
        """Parse the words after the subcommand, and run it."""
        return self.call(self.make_parser().read(words))

    def call(self, options: Any) -> int:
        """Run the subcommand with a parsed namespace."""
        with working("importing torch") if self.imports_torch else nullcontext():
            module, _, function = self.target.partition(":")
            run = getattr(import_module(module), function or "run")
        return run(options)


COMMANDS: Mapping[str, Subcommand] = {
    "config": Subcommand("accel_cli.commands.config", "Create a launch config interactively.", "config"),
    "launch": Subcommand("accel_cli.launch.command", "Launch a script in one or more processes.", "launch"),
    "test": Subcommand(
        "accel_cli.commands.selftest", "Check that training works on this machine.", "selftest"
    ),
    "env": Subcommand("accel_cli.commands.env", "Print environment information for bug reports.", "env"),
    "merge-weights": Subcommand(
        "accel_cli.commands.merge",
        "Merge a sharded checkpoint into full weights.",
        "merge",
        imports_torch=True,
    ),
    "to-fsdp2": Subcommand(
        "accel_cli.commands.config:run_to_fsdp2", "Convert an FSDP config file to FSDP2.", "to_fsdp2"
    ),
    "tpu-config": Subcommand("accel_cli.commands.tpu", "Run commands on all machines of a TPU pod.", "tpu"),
    "examples": Subcommand(
        "accel_cli.commands.examples", "Copy the example scripts to a folder.", "examples"
    ),
    "completion": Subcommand(
        "accel_cli.commands.completion", "Print a shell completion script.", "completion"
    ),
}
"""The subcommands of this distribution, in the order of the overview."""
