"""Parser of `accel tpu-config`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file


def parser() -> Parser:
    """Build the parser."""
    made = Parser("tpu-config", "Run commands on all hosts of a Google Cloud TPU pod before training.")
    where = made.add_argument_group("the pod (defaults come from the config file)")
    add_config_file(where, "read")
    where.add_argument("--tpu_name", metavar="NAME", help="the name of the TPU [key tpu_name]")
    where.add_argument("--tpu_zone", metavar="ZONE", help="its zone [key tpu_zone]")
    where.add_argument("--use_alpha", action="store_true", help="use `gcloud alpha`")
    what = made.add_argument_group("what to run")
    what.add_argument("--command_file", metavar="FILE", help="a file of commands [key command_file]")
    what.add_argument(
        "--command",
        action="append",
        nargs="+",
        metavar="COMMAND",
        help="a command; may be repeated [key commands]",
    )
    what.add_argument("--install_accelerate", action="store_true", help="first install accel on the pod")
    what.add_argument(
        "--accelerate_version",
        default="latest",
        metavar="VERSION",
        help="the version of accel to install (default: %(default)s)",
    )
    made.add_argument("--debug", action="store_true", help="show the command line, and run nothing")
    return made
