"""Parser of `accel config`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file, setting

ACTIONS = ("default", "update")


def parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "config",
        "Ask how to launch scripts on this host, and write the answers to a config file. `accel config"
        " default` writes the defaults of this host without questions; `accel config update` rewrites a"
        " file of a legacy format.",
    )
    made.add_argument("action", nargs="?", choices=ACTIONS, help="without an action, questions are asked")
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
