"""What `accel config` takes."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file, setting

ACTIONS = ("default", "update")


def parser() -> Parser:
    """Make the parser."""
    made = Parser(
        "config",
        "Ask how scripts are to be run on this machine, and write it to a config file. `accel config default`"
        " asks nothing and writes what suits this machine; `accel config update` rewrites a file of an older"
        " format.",
    )
    made.add_argument("action", nargs="?", choices=ACTIONS, help="without one, questions are asked")
    add_config_file(made, "write, YAML or JSON")
    made.add_argument(
        "--mixed_precision",
        choices=("no", "fp16", "bf16"),
        help=setting(
            "precision.mixed_precision",
            "with `default`: the precision of forward and backward passes (default: no)",
        ),
    )
    return made
