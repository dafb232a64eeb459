"""`accel completion`: write a shell's completion script to the standard output."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

from accel_cli.commands.completion.grammar import grammar
from accel_cli.commands.completion.shells import WRITERS

if TYPE_CHECKING:
    from argparse import Namespace


def run(options: Namespace) -> int:
    """Write the completion script."""
    main = import_module("accel_cli.main")  # whose table names this module
    commands = {name: command.help for name, command in main.COMMANDS.items()}
    parsers = {name: command.make_parser() for name, command in main.COMMANDS.items() if command.parser}
    sys.stdout.write(WRITERS[options.shell](grammar(commands, parsers)))
    return 0
