"""Parser of `accel check`."""

from __future__ import annotations

import argparse

from accel_cli.commands.arguments.parser import Parser, add_config_file, number


def parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "check",
        "Run a script for a few batches as selected ranks of a job, without devices, weights or the other"
        " processes, and report: the settings, the memory of each rank, collectives that a rank would miss,"
        " and the files of a checkpoint.",
    )
    made.add_argument("--world", type=number(1), required=True, metavar="N", help="world size")
    made.add_argument("--memory", metavar="SIZE", help="memory of each device, as in 80GiB")
    made.add_argument(
        "--devices_per_machine", type=number(1), default=8, metavar="N", help="default: %(default)s"
    )
    made.add_argument(
        "--batches",
        type=number(1),
        default=3,
        metavar="N",
        help="batches of every loader (default: %(default)s)",
    )
    made.add_argument(
        "--ranks",
        metavar="LIST",
        help="the ranks to check, as 0,1,127; by default the first, the second, the first of the second"
        " node, and the last",
    )
    made.add_argument(
        "--timeout",
        type=number(1),
        default=600,
        metavar="SECONDS",
        help="for each rank (default: %(default)s)",
    )
    add_config_file(made, "use")
    made.add_argument("--json", action="store_true", help="write the findings as JSON")
    made.add_argument(
        "--html", metavar="FILE", help="also write a report: collectives and memory by rank; it opens offline"
    )
    made.add_argument("--quiet", "-q", action="store_true", help="show only problems")
    made.add_argument("script", help="the script")
    made.add_argument("script_arguments", nargs=argparse.REMAINDER, help="its arguments")
    return made
