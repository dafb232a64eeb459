"""The commands for programs that carry them within their own: a parser and a function for each.

A parser is made with `subparsers` as the subcommand of another one, and without as one of its own. A function
takes the namespace that the parser made; what another namespace lacks is as if it had not been said.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

from accel_cli.commands.to_fsdp2 import to_fsdp2
from accel_cli.main import COMMANDS

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Callable, Mapping


def _functions(name: str) -> tuple[Callable[..., ArgumentParser], Callable[[Namespace], None]]:
    command = COMMANDS[name]

    def make_parser(subparsers: Any = None) -> ArgumentParser:
        """Make the parser of the subcommand; see the module."""
        made = command.make_parser()
        if subparsers is None:
            return made
        parser = subparsers.add_parser(name, parents=[made], add_help=False, description=made.description)
        parser.set_defaults(func=run)
        return parser

    def run(args: Namespace) -> None:
        """Run the subcommand; see the module."""
        unsaid = {
            action.dest: action.default for action in command.make_parser().actions if action.dest != "help"
        }
        if code := command.call(Namespace(**{**unsaid, **vars(args)})):
            raise SystemExit(code)

    return make_parser, run


get_config_parser, config_command = _functions("config")
env_command_parser, env_command = _functions("env")
estimate_command_parser, estimate_command = _functions("estimate-memory")
merge_command_parser, merge_command = _functions("merge-weights")
test_command_parser, test_command = _functions("test")
to_fsdp2_command_parser, to_fsdp2_command = _functions("to-fsdp2")
tpu_command_parser, tpu_command_launcher = _functions("tpu-config")


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite the keys of a config file for FSDP as those for FSDP2.

    Raises:
        SettingsError: There is nothing in FSDP2 for one of them.

    Example:
        >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}})
        {'fsdp_config': {'fsdp_version': 2, 'fsdp_reshard_after_forward': False}}
    """
    return dict(to_fsdp2(config).config)
