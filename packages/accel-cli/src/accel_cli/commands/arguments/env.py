"""What `accel env` takes."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file


def parser() -> Parser:
    """Make the parser."""
    made = Parser(
        "env", "Tell what a bug report should say: versions, devices, launcher and settings; no secrets."
    )
    add_config_file(made, "look at")
    made.add_argument("--json", action="store_true", help="as JSON rather than as text")
    return made
