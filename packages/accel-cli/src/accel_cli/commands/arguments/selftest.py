"""Parser of `accel test`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, add_config_file, number, setting


def parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "test",
        "Check in less than two minutes whether this host trains correctly with a config: collectives, data"
        " loading, equality with one process, mixed precision, checkpoints, and transfer speeds.",
    )
    add_config_file(made, "test")
    made.add_argument(
        "--num_processes",
        type=number(1),
        metavar="N",
        help=setting("launch.num_processes", "as for accel launch, instead of the config's"),
    )
    made.add_argument(
        "--cpu", action="store_true", help=setting("process.use_cpu", "as for accel launch: use the CPU")
    )
    made.add_argument(
        "--mixed_precision",
        choices=("no", "fp16", "bf16", "fp8"),
        help=setting("precision.mixed_precision", "as for accel launch"),
    )
    made.add_argument("--json", action="store_true", help="write the results as JSON")
    made.add_argument("--html", metavar="FILE", help="also write a report with charts; it opens offline")
    made.add_argument("--quiet", "-q", action="store_true", help="show only failures")
    return made
