"""`accel completion`: write the completion script of a shell to the standard output."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

import shtab

from accel_cli.arguments import SettingAction
from accel_cli.main import COMMANDS, Subcommand, installed_commands


def run(options: Namespace) -> int:
    """Write the completion script."""
    parser = ArgumentParser("accel")
    subparsers = parser.add_subparsers()
    for name, command in {**COMMANDS, **installed_commands()}.items():
        if not isinstance(command, Subcommand):
            continue
        made = command.make_parser()
        for action in made.actions:
            if isinstance(action, SettingAction) and action.row.option.choices and action.nargs is None:
                action.choices = action.row.option.choices
            if action.dest in {"script", "script_arguments"}:
                setattr(action, "complete", shtab.FILE)  # noqa: B010 - shtab's attribute
        subparsers.add_parser(name, parents=[made], add_help=False, help=command.help)
    sys.stdout.write(shtab.complete(parser, options.shell))
    return 0
