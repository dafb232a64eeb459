"""Parser of `accel estimate-memory`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser, number

DTYPES = ("float32", "float16", "int8", "int4")
LIBRARIES = ("timm", "transformers")


def parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "estimate-memory",
        "Estimate the memory of a model: its weights by dtype, and its training on each device by strategy."
        " Nothing is loaded or computed.",
    )
    made.add_argument(
        "model_name",
        help="a folder or file with weights, a transformers configuration (config.json), or the id of a model"
        " on the hub, which is looked for in the local cache first",
    )
    model = made.add_argument_group("the model")
    model.add_argument("--library_name", choices=LIBRARIES, help="the library that defines the model")
    model.add_argument(
        "--dtypes",
        nargs="+",
        choices=DTYPES,
        default=[*DTYPES],
        help="the dtypes of the weights to list (default: all)",
    )
    model.add_argument(
        "--trust_remote_code", action="store_true", help="run the code that comes with a model from the hub"
    )
    _add_training(made)
    output = made.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="write JSON, in bytes")
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="also draw a picture (.svg, .png, .pdf): memory by strategy; with --batch_size over the passes;"
        " with --memory the device map of inference",
    )
    output.add_argument("--quiet", "-q", action="store_true", help="show the numbers without the notes")
    return made


def _add_training(made: Parser) -> None:
    training = made.add_argument_group("training")
    training.add_argument("--num_devices", type=number(1), metavar="N", help="number of devices (default: 1)")
    training.add_argument(
        "--memory", metavar="SIZE", help="memory of each device, as in 80GiB; suggests what fits"
    )
    training.add_argument("--host_memory", metavar="SIZE", help="main memory of each node, for offloading")
    training.add_argument(
        "--devices_per_machine", type=number(1), default=8, metavar="N", help="default: %(default)s"
    )
    training.add_argument(
        "--mixed_precision",
        choices=("no", "fp16", "bf16", "fp8"),
        default="bf16",
        help="precision of forward and backward passes; fp8 stores what bf16 does (default: %(default)s)",
    )
    training.add_argument(
        "--batch_size",
        type=number(1),
        metavar="N",
        help="samples per device and micro-batch; adds the activations",
    )
    training.add_argument(
        "--sequence_length", type=number(1), default=512, metavar="N", help="tokens (default: %(default)s)"
    )
    for flag, what in (
        ("tp_degree", "tensor"),
        ("pp_degree", "pipeline"),
        ("context_parallel_size", "context"),
    ):
        training.add_argument(
            f"--megatron_lm_{flag}",
            type=number(1),
            metavar="N",
            help=f"{what}-parallel size; adds the rows of Megatron",
        )
    training.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute the activations of blocks in the backward pass",
    )
