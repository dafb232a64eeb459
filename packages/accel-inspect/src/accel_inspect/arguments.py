"""The subcommands `check`, `doctor` and `estimate-memory`, and their parsers."""

from __future__ import annotations

from typing import Any

from accel_cli.arguments import Parser, add_config_file, count, size
from accel_cli.main import Subcommand

DTYPES = ("float32", "float16", "int8", "int4")

AXIS_NAMES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "ep", "pp")
"""The axes of `ParallelismConfig`. The command does not import that class."""


def _number(group: Any, flag: str, text: str = "", default: int | None = None, unit: str = "N") -> None:
    """Add a flag whose value is a number."""
    text = text if default is None else f"{text} (default: {default})".strip()
    group.add_argument(flag, type=count, metavar=unit, default=default, help=text)


def _switch(group: Any, *flags: str, text: str) -> None:
    group.add_argument(*flags, action="store_true", help=text)


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
    text = "the library that defines the model"
    model.add_argument("--library_name", choices=("timm", "transformers"), help=text)
    text = "the dtypes of the weights to list (default: all)"
    model.add_argument("--dtypes", nargs="+", choices=DTYPES, default=[*DTYPES], help=text)
    _switch(model, "--trust_remote_code", text="run custom code of a model from the hub")
    training = made.add_argument_group("training")
    _number(training, "--num_devices", "number of devices (default: 1)")
    text = "memory of each device, such as 80GiB; shows which strategies fit"
    training.add_argument("--memory", type=size, metavar="SIZE", help=text)
    text = "host memory of each node, for offloading"
    training.add_argument("--host_memory", type=size, metavar="SIZE", help=text)
    _number(training, "--devices_per_machine", default=8)
    precisions = ("no", "fp16", "bf16", "fp8")
    text = "precision of the passes (fp8 stores the same tensors as bf16) (default: %(default)s)"
    training.add_argument("--mixed_precision", choices=precisions, default="bf16", help=text)
    text = "optimizer of the script; DeepSpeed has its own (default: %(default)s)"
    training.add_argument("--optimizer", choices=("adam", "muon", "host_adamw"), default="adam", help=text)
    _number(training, "--batch_size", "samples per device and micro-batch; includes activations")
    _number(training, "--sequence_length", "tokens", 512)
    for axis in AXIS_NAMES:
        text = f"size of the axis {axis}; adds a row for the combination of axes"
        _number(training, f"--parallelism_config_{axis}_size", text)
    text = "recompute the activations of blocks in the backward pass"
    _switch(training, "--gradient_checkpointing", text=text)
    _number(training, "--loss_chunk_size", "tokens per chunk of logits; with --batch_size")
    _number(training, "--mlp_tile_size", "tokens per tile of an MLP; with --batch_size")
    output = made.add_argument_group("output")
    _switch(output, "--json", text="write JSON (sizes in bytes)")
    _switch(output, "--quiet", "-q", text="show the numbers without the notes")
    return made


def check() -> Parser:
    """Build the parser of `accel check`."""
    made = Parser(
        "check",
        "Dry-run a script for a few batches as selected ranks of a job, without devices, weights or the "
        "other processes. Reports the settings, the memory of each rank, collectives that a rank would "
        "miss, and checkpoint files.",
        "All flags of `accel launch` are also accepted.",
    )
    _number(made, "--world", "world size (default: from the settings, else 2)")
    made.add_argument("--memory", type=size, metavar="SIZE", help="memory of each device, such as 80GiB")
    _number(made, "--devices_per_machine", default=8)
    _number(made, "--batches", "batches to read from every loader", 3)
    text = "the ranks, such as 0,1,127 (default: the first two, the first of the second node, and the last)"
    made.add_argument("--ranks", metavar="LIST", help=text)
    made.add_argument("--html", metavar="FILE", help="also write the report as an HTML page")
    return _add_script(made, "check")


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
    _number(made, "--steps", "optimizer steps of each pass over a training loader", 3)
    _switch(made, "--on_device", text="run on the devices of the settings instead of the CPU")
    _number(made, "--blocks", "keep only the first N layers of each list of layers")
    _switch(made, "--no_resume", text="skip the check that saves a checkpoint and resumes from it")
    return _add_script(made, "doctor")


def _add_script(made: Parser, name: str) -> Parser:
    _number(made, "--timeout", "for each process", 600, "SECONDS")
    add_config_file(made, "use")
    _switch(made, "--json", text="write the findings as JSON")
    _switch(made, "--quiet", "-q", text="show only problems")
    made.add_settings(hidden=True)
    made.add_script(f"accel {name} [options] script [script_arguments ...]")
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
