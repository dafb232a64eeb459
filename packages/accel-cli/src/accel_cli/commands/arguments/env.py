"""Parser of `accel env`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file


def parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "env", "Show what a bug report needs: versions, devices, launcher and settings; no secrets."
    )
    add_config_file(made, "read")
    made.add_argument("--json", action="store_true", help="write JSON instead of text")
    return made
