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


def get_config_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `accel config`; see the module."""
    return _parser("config", config_command, subparsers)


def config_command(args: Namespace) -> None:
    """Run `accel config`; see the module."""
    _run("config", args)


def env_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `accel env`; see the module."""
    return _parser("env", env_command, subparsers)


def env_command(args: Namespace) -> None:
    """Run `accel env`; see the module."""
    _run("env", args)


def estimate_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `accel estimate-memory`; see the module."""
    return _parser("estimate-memory", estimate_command, subparsers)


def estimate_command(args: Namespace) -> None:
    """Run `accel estimate-memory`; see the module."""
    _run("estimate-memory", args)


def merge_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `accel merge-weights`; see the module."""
    return _parser("merge-weights", merge_command, subparsers)


def merge_command(args: Namespace) -> None:
    """Run `accel merge-weights`; see the module."""
    _run("merge-weights", args)


def test_command_parser(subparsers: Any = None) -> ArgumentParser:  # noqa: PT028 - no test
    """Make the parser of `accel test`; see the module."""
    return _parser("test", test_command, subparsers)


def test_command(args: Namespace) -> None:
    """Run `accel test`; see the module."""
    _run("test", args)


def to_fsdp2_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `accel to-fsdp2`; see the module."""
    return _parser("to-fsdp2", to_fsdp2_command, subparsers)


def to_fsdp2_command(args: Namespace) -> None:
    """Run `accel to-fsdp2`; see the module."""
    _run("to-fsdp2", args)


def convert_config_to_fsdp2(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rewrite the keys of a config file for FSDP as those for FSDP2.

    Raises:
        SettingsError: There is nothing in FSDP2 for one of them.

    Example:
        >>> convert_config_to_fsdp2({"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}})
        {'fsdp_config': {'fsdp_version': 2, 'fsdp_reshard_after_forward': False}}
    """
    return dict(to_fsdp2(config).config)


def tpu_command_parser(subparsers: Any = None) -> ArgumentParser:
    """Make the parser of `accel tpu-config`; see the module."""
    return _parser("tpu-config", tpu_command_launcher, subparsers)


def tpu_command_launcher(args: Namespace) -> None:
    """Run `accel tpu-config`; see the module."""
    _run("tpu-config", args)


def _parser(name: str, function: Callable[[Namespace], None], subparsers: Any) -> ArgumentParser:
    made = COMMANDS[name].make_parser()
    if subparsers is None:
        return made
    parser = subparsers.add_parser(name, parents=[made], add_help=False, description=made.description)
    parser.set_defaults(func=function)
    return parser


def _run(name: str, args: Namespace) -> None:
    """Run a command."""
    command = COMMANDS[name]
    unsaid = {
        action.dest: action.default for action in command.make_parser().actions if action.dest != "help"
    }
    if code := command.call(Namespace(**{**unsaid, **vars(args)})):
        raise SystemExit(code)
