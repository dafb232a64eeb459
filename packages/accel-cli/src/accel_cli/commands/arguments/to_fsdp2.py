"""Parser of `accel to-fsdp2`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file


def parser() -> Parser:
    """Build the parser."""
    made = Parser("to-fsdp2", "Rewrite a config file for FSDP (version 1) as one for FSDP2.")
    add_config_file(made, "read")
    made.add_argument("--output_file", metavar="FILE", help="the file to write")
    made.add_argument(
        "--overwrite", action="store_true", help="replace the file that is read, or the output file"
    )
    made.add_argument("--quiet", "-q", action="store_true", help="do not print the changes")
    return made
