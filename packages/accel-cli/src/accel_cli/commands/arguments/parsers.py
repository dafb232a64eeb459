"""The parsers of the subcommands."""

from __future__ import annotations

import argparse

from accel_cli.commands.arguments.parser import Parser, add_config_file, count, setting

DTYPES = ("float32", "float16", "int8", "int4")
_EPILOG = (
    'bash: eval "$(accel completion bash)" in ~/.bashrc; zsh: eval "$(accel completion zsh)" in ~/.zshrc,'
    " after compinit; fish: accel completion fish > ~/.config/fish/completions/accel.fish"
)


def config() -> Parser:
    """Build the parser of `accel config`."""
    made = Parser(
        "config",
        "Ask how to launch scripts on this host, and write the answers to a config file. `accel config"
        " default` writes the defaults of this host without questions; `accel config update` rewrites a"
        " file of a legacy format.",
    )
    made.add_argument(
        "action", nargs="?", choices=("default", "update"), help="without an action, questions are asked"
    )
    add_config_file(made, "write, YAML or JSON")
    made.add_argument(
        "--mixed_precision",
        choices=("no", "fp16", "bf16"),
        help=setting(
            "precision.mixed_precision",
            "with `default`: the precision of forward and backward passes (default: no)",
        ),
    )
    return made


def selftest() -> Parser:
    """Build the parser of `accel test`."""
    made = Parser(
        "test",
        "Check in less than two minutes whether this host trains correctly with a config: collectives, data"
        " loading, equality with one process, mixed precision, checkpoints, and transfer speeds.",
    )
    add_config_file(made, "test")
    made.add_argument(
        "--num_processes",
        type=count,
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


def env() -> Parser:
    """Build the parser of `accel env`."""
    made = Parser(
        "env", "Show what a bug report needs: versions, devices, launcher and settings; no secrets."
    )
    add_config_file(made, "read")
    made.add_argument("--json", action="store_true", help="write JSON instead of text")
    return made


def estimate() -> Parser:
    """Build the parser of `accel estimate-memory`."""
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
    model.add_argument(
        "--library_name", choices=("timm", "transformers"), help="the library that defines the model"
    )
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
    training.add_argument("--num_devices", type=count, metavar="N", help="number of devices (default: 1)")
    training.add_argument(
        "--memory", metavar="SIZE", help="memory of each device, as in 80GiB; suggests what fits"
    )
    training.add_argument("--host_memory", metavar="SIZE", help="main memory of each node, for offloading")
    training.add_argument(
        "--devices_per_machine", type=count, default=8, metavar="N", help="default: %(default)s"
    )
    training.add_argument(
        "--mixed_precision",
        choices=("no", "fp16", "bf16", "fp8"),
        default="bf16",
        help="precision of forward and backward passes; fp8 stores what bf16 does (default: %(default)s)",
    )
    training.add_argument(
        "--batch_size",
        type=count,
        metavar="N",
        help="samples per device and micro-batch; adds the activations",
    )
    training.add_argument(
        "--sequence_length", type=count, default=512, metavar="N", help="tokens (default: %(default)s)"
    )
    for flag, what in (
        ("tp_degree", "tensor"),
        ("pp_degree", "pipeline"),
        ("context_parallel_size", "context"),
    ):
        training.add_argument(
            f"--megatron_lm_{flag}",
            type=count,
            metavar="N",
            help=f"{what}-parallel size; adds the rows of Megatron",
        )
    training.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="recompute the activations of blocks in the backward pass",
    )


def check() -> Parser:
    """Build the parser of `accel check`."""
    made = Parser(
        "check",
        "Run a script for a few batches as selected ranks of a job, without devices, weights or the other"
        " processes, and report: the settings, the memory of each rank, collectives that a rank would miss,"
        " and the files of a checkpoint.",
    )
    made.add_argument("--world", type=count, required=True, metavar="N", help="world size")
    made.add_argument("--memory", metavar="SIZE", help="memory of each device, as in 80GiB")
    made.add_argument(
        "--devices_per_machine", type=count, default=8, metavar="N", help="default: %(default)s"
    )
    made.add_argument(
        "--batches",
        type=count,
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
        type=count,
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


def merge() -> Parser:
    """Build the parser of `accel merge-weights`."""
    made = Parser(
        "merge-weights",
        "Merge a sharded checkpoint of FSDP or torch.distributed.checkpoint into full weights.",
    )
    made.add_argument(
        "checkpoint_directory",
        help="the folder of shards (it holds .metadata), or a checkpoint of save_state that holds one",
    )
    made.add_argument("output_path", help="the folder to write to")
    made.add_argument(
        "--unsafe_serialization", action="store_true", help="write pytorch_model.bin rather than safetensors"
    )
    made.add_argument(
        "--remove_checkpoint_dir",
        action="store_true",
        help="delete the shards once the merged weights are written",
    )
    made.add_argument("--quiet", "-q", action="store_true", help="print nothing on success")
    return made


def to_fsdp2() -> Parser:
    """Build the parser of `accel to-fsdp2`."""
    made = Parser("to-fsdp2", "Rewrite a config file for FSDP (version 1) as one for FSDP2.")
    add_config_file(made, "read")
    made.add_argument("--output_file", metavar="FILE", help="the file to write")
    made.add_argument(
        "--overwrite", action="store_true", help="replace the file that is read, or the output file"
    )
    made.add_argument("--quiet", "-q", action="store_true", help="do not print the changes")
    return made


def tpu() -> Parser:
    """Build the parser of `accel tpu-config`."""
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


def completion() -> Parser:
    """Build the parser of `accel completion`."""
    made = Parser(
        "completion", "Write a completion script of accel's commands and flags for a shell.", _EPILOG
    )
    made.add_argument("shell", choices=("bash", "zsh", "fish"))
    return made
