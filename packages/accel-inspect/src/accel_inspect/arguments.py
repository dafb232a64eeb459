"""The subcommands `check`, `doctor` and `estimate-memory`, and their parsers."""

from __future__ import annotations

from accel_cli.arguments import Parser, add_config_file, count, size
from accel_cli.main import Subcommand


def estimate() -> Parser:
    """Build the parser of `accel estimate-memory`."""
    made = Parser(
        "estimate-memory",
        "Estimate the memory of a model's weights by dtype, and of its training on each device by "
        "strategy. Nothing is loaded or computed.",
    )
    made.add_argument(
        "model_name",
        help="a folder or file with weights, a transformers configuration (config.json), or the id of a "
        "model on the hub (the local cache is searched first)",
    )
    model = made.add_argument_group("the model")
    model.add_argument(
        "--library_name", choices=("timm", "transformers"), help="the library that defines the model"
    )
    text = "the dtypes of the weights to list (default: all)"
    model.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], help=text)
    text = "run custom code of a model from the hub"
    model.add_argument("--trust_remote_code", action="store_true", help=text)
    _add_training(made)
    output = made.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="write JSON (sizes in bytes)")
    output.add_argument("--quiet", "-q", action="store_true", help="show the numbers without the notes")
    return made


DTYPES = ("float32", "float16", "int8", "int4")

AXIS_NAMES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
"""The axes of `ParallelismConfig`. The command does not import that class."""


def _add_training(made: Parser) -> None:
    training = made.add_argument_group("training")
    training.add_argument("--num_devices", type=count, metavar="N", help="number of devices (default: 1)")
    text = "memory of each device, such as 80GiB; suggests a config that fits"
    training.add_argument("--memory", type=size, metavar="SIZE", help=text)
    text = "host memory of each node, for offloading"
    training.add_argument("--host_memory", type=size, metavar="SIZE", help=text)
    text = "default: %(default)s"
    training.add_argument("--devices_per_machine", type=count, metavar="N", help=text, default=8)
    text = (
        "precision of forward and backward passes (fp8 stores the same tensors as bf16) (default: "
        "%(default)s)"
    )
    training.add_argument(
        "--mixed_precision", choices=("no", "fp16", "bf16", "fp8"), default="bf16", help=text
    )
    text = "optimizer of the script; DeepSpeed and Megatron have their own (default: %(default)s)"
    training.add_argument("--optimizer", choices=("adam", "muon", "host_adamw"), default="adam", help=text)
    text = "samples per device and micro-batch; includes activations"
    training.add_argument("--batch_size", type=count, metavar="N", help=text)
    text = "tokens (default: %(default)s)"
    training.add_argument("--sequence_length", type=count, metavar="N", help=text, default=512)
    sizes = {"tp_degree": "tensor", "pp_degree": "pipeline", "context_parallel_size": "context"}
    for flag, what in sizes.items():
        text = f"{what}-parallel size; adds rows for Megatron"
        training.add_argument(f"--megatron_lm_{flag}", type=count, metavar="N", help=text)
    for axis in AXIS_NAMES:
        text = f"size of the axis {axis}; adds a row for the combination of axes"
        training.add_argument(f"--parallelism_config_{axis}_size", type=count, metavar="N", help=text)
    text = "recompute the activations of blocks in the backward pass"
    training.add_argument("--gradient_checkpointing", action="store_true", help=text)
    text = "tokens per chunk of logits; with --batch_size"
    training.add_argument("--loss_chunk_size", type=count, metavar="N", help=text)
    text = "tokens per tile of an MLP; with --batch_size"
    training.add_argument("--mlp_tile_size", type=count, metavar="N", help=text)


def check() -> Parser:
    """Build the parser of `accel check`."""
    made = Parser(
        "check",
        "Dry-run a script for a few batches as selected ranks of a job, without devices, weights or the "
        "other processes. Reports the settings, the memory of each rank, collectives that a rank would "
        "miss, and checkpoint files.",
        "All flags of `accel launch` are also accepted.",
    )
    text = "world size (default: from the settings, else 2)"
    made.add_argument("--world", type=count, metavar="N", help=text)
    made.add_argument("--memory", type=size, metavar="SIZE", help="memory of each device, such as 80GiB")
    text = "default: %(default)s"
    made.add_argument("--devices_per_machine", type=count, metavar="N", help=text, default=8)
    text = "batches to read from every loader (default: %(default)s)"
    made.add_argument("--batches", type=count, metavar="N", help=text, default=3)
    made.add_argument(
        "--ranks",
        metavar="LIST",
        help="the ranks to check, such as 0,1,127 (default: the first two, the first of the second node, and"
        " the last)",
    )
    text = "for each rank (default: %(default)s)"
    made.add_argument("--timeout", type=count, metavar="SECONDS", help=text, default=600)
    add_config_file(made, "use")
    made.add_argument("--json", action="store_true", help="write the findings as JSON")
    made.add_argument(
        "--html",
        metavar="FILE",
        help="also write the report as an HTML page",
    )
    made.add_argument("--quiet", "-q", action="store_true", help="show only problems")
    made.add_settings(hidden=True)
    made.add_script("accel check [options] script [script_arguments ...]")
    return made


def doctor() -> Parser:
    """Build the parser of `accel doctor`."""
    made = Parser(
        "doctor",
        "Run a script for a few optimizer steps twice: with the ranks and strategy of the settings, and "
        "in one process with the same global batches. Reports differences in samples, losses, "
        "gradients, weights, learning rates, gathered results, and a resumed run. Ranks are processes "
        "on this machine's CPU. The exit code is 1 if the runs differ.",
        "All flags of `accel launch` are also accepted. The default of --num_processes is 2.",
    )
    text = "optimizer steps of each pass over a training loader (default: %(default)s)"
    made.add_argument("--steps", type=count, metavar="N", help=text, default=3)
    text = "run on the devices of the settings instead of the CPU"
    made.add_argument("--on_device", action="store_true", help=text)
    text = "keep only the first N layers of each list of layers"
    made.add_argument("--blocks", type=count, metavar="N", help=text)
    text = "skip the check that saves a checkpoint and resumes from it"
    made.add_argument("--no_resume", action="store_true", help=text)
    text = "for each run (default: %(default)s)"
    made.add_argument("--timeout", type=count, metavar="SECONDS", help=text, default=600)
    add_config_file(made, "use")
    made.add_argument("--json", action="store_true", help="write the report as JSON")
    made.add_argument("--quiet", "-q", action="store_true", help="show only differences")
    made.add_settings(hidden=True)
    made.add_script("accel doctor [options] script [script_arguments ...]")
    return made


ESTIMATE = Subcommand(
    "accel_inspect.estimate.command",
    "Estimate the memory of a model, at rest and in training.",
    "accel_inspect.arguments:estimate",
    imports_torch=True,
)
CHECK = Subcommand(
    "accel_inspect.check.command",
    "Dry-run a script as ranks of a large job, without devices.",
    "accel_inspect.arguments:check",
)
DOCTOR = Subcommand(
    "accel_inspect.doctor.command",
    "Compare a run on many ranks with a run in one process.",
    "accel_inspect.arguments:doctor",
)
