"""What `accel to-fsdp2` takes."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file


def parser() -> Parser:
    """Make the parser."""
    made = Parser("to-fsdp2", "Rewrite a config file for FSDP (version 1) as one for FSDP2.")
    add_config_file(made, "read")
    made.add_argument("--output_file", metavar="FILE", help="where to write the new one")
    made.add_argument(
        "--overwrite", action="store_true", help="write over the file that is read, or over the output file"
    )
    made.add_argument("--quiet", "-q", action="store_true", help="do not tell what was changed")
    return made
