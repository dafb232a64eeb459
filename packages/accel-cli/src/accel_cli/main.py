"""The `accel` command: the table of subcommands, each imported when it is chosen."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from accel_cli.output import working
from accel_state.errors import AccelError, did_you_mean
from accel_state.frozen import frozen

if TYPE_CHECKING:
    from accel_cli.arguments import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: The words after `accel`; those of this process if None.

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
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS, f"there are {', '.join(COMMANDS)}.")
        return _fail("accel", f"{name!r} is not a command; {hint}")
    try:
        return COMMANDS[name].run(words)
    except AccelError as error:
        return _fail(f"accel {name}", str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def run(name: str) -> int:
    """Run a subcommand with the arguments of this process."""
    return main([name, *sys.argv[1:]])


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "".join(f"  {name:<{width}}  {command.help}\n" for name, command in COMMANDS.items())
    return (
        "usage: accel <command> [options]; accel --version\n\n"
        "Launch and inspect PyTorch programs on any number of devices.\n\n"
        f"commands:\n{lines}\n`accel <command> --help` lists the options of a command.\n"
    )


def _fail(program: str, message: str) -> int:
    sys.stderr.write(f"{program}: error: {message}\n")
    return ERROR


ERROR = 2
"""The exit code of a command line that cannot be carried out; nothing was started."""


INTERRUPTED = 130
"""The exit code after Ctrl-C, as of a shell."""


config, estimate_memory, launch, merge_weights = (
    partial(run, name) for name in ("config", "estimate-memory", "launch", "merge-weights")
)
"""The entry points of the programs `accel-config`, `accel-estimate-memory` and so on."""


@frozen
class Subcommand:
    """A subcommand.

    Args:
        target: The module whose function `run`, or the `"module:function"`, takes the parsed namespace, or
            without a parser the words after the subcommand, and returns the exit code.
        help: A line for the overview.
        parser: The function of `accel_cli.arguments` that makes the parser; help and errors of the command
            line do not import the target.
        imports_torch: Whether the target imports torch, which takes seconds.
    """

    target: str
    help: str
    parser: str | None = None
    imports_torch: bool = False

    def make_parser(self) -> Parser:
        """Make the parser, of a subcommand that has one."""
        assert self.parser is not None  # noqa: S101 - for ourselves
        return getattr(import_module("accel_cli.arguments"), self.parser)()

    def run(self, words: Sequence[str]) -> int:
        """Parse the words after the subcommand, and run it."""
        return self.call(words if self.parser is None else self.make_parser().read(words))

    def call(self, options: Any) -> int:
        """Run it with a parsed namespace, or the words if it has no parser."""
        with working("importing torch") if self.imports_torch else nullcontext():
            module, _, function = self.target.partition(":")
            run = getattr(import_module(module), function or "run")
        return run(options)


COMMANDS: Mapping[str, Subcommand] = {
    "config": Subcommand(
        target="accel_cli.commands.config",
        help="Create a launch config interactively.",
        parser="config",
    ),
    "launch": Subcommand(
        target="accel_cli.launch.command",
        help="Launch a script in one or more processes.",
        parser="launch",
    ),
    "test": Subcommand(
        target="accel_cli.commands.selftest",
        help="Check that training works on this machine.",
        parser="selftest",
    ),
    "env": Subcommand(
        target="accel_cli.commands.env",
        help="Print environment information for bug reports.",
        parser="env",
    ),
    "estimate-memory": Subcommand(
        target="accel_cli.commands.estimate.command",
        help="Estimate the memory of a model, at rest and in training.",
        parser="estimate",
        imports_torch=True,
    ),
    "check": Subcommand(
        target="accel_cli.commands.check.command",
        help="Dry-run a script as ranks of a large job, without devices.",
        parser="check",
    ),
    "doctor": Subcommand(
        target="accel_cli.commands.doctor.command",
        help="Compare a run on many ranks with a run in one process.",
        parser="doctor",
    ),
    "merge-weights": Subcommand(
        target="accel_cli.commands.merge",
        help="Merge a sharded checkpoint into full weights.",
        parser="merge",
        imports_torch=True,
    ),
    "convert-checkpoint": Subcommand(
        target="accel_cli.commands.convert",
        help="Write a checkpoint in another format.",
        parser="convert",
        imports_torch=True,
    ),
    "to-fsdp2": Subcommand(
        target="accel_cli.commands.config:run_to_fsdp2",
        help="Convert an FSDP config file to FSDP2.",
        parser="to_fsdp2",
    ),
    "tpu-config": Subcommand(
        target="accel_cli.commands.tpu",
        help="Run commands on all machines of a TPU pod.",
        parser="tpu",
    ),
    "examples": Subcommand(
        target="accel_cli.commands.examples",
        help="Copy the example scripts to a folder.",
        parser="examples",
    ),
    "completion": Subcommand(
        target="accel_cli.commands.completion",
        help="Print a shell completion script.",
        parser="completion",
    ),
}
"""The subcommands, in the order of the overview."""
