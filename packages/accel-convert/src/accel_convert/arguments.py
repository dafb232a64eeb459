"""The row of `accel convert-checkpoint` in the table of subcommands, and its parser."""

from __future__ import annotations

from accel_cli.arguments import Parser
from accel_cli.main import Subcommand

FORMATS = ("safetensors", "torch", "full", "sharded", "dcp", "universal")
"""The formats to which it converts."""


def make_parser() -> Parser:
    """Build the parser."""
    made = Parser(
        "convert-checkpoint",
        "Write a checkpoint in another format, one chunk of a tensor at a time. The format of FROM is "
        "detected from its files. Every written tensor is read back and compared.",
        "FROM and TO are folders, or URLs such as s3://bucket/run; FROM may also be a file of weights.",
    )
    made.add_argument("source", metavar="FROM", help="the checkpoint to read")
    made.add_argument("target", metavar="TO", help="the output folder, which must be absent or empty")
    text = (
        "safetensors or torch: weight files as transformers saves them. full or sharded: a state for "
        "Accelerator.load_state. dcp: a folder of torch.distributed.checkpoint. universal: a universal "
        "DeepSpeed checkpoint"
    )
    made.add_argument("--to", choices=FORMATS, required=True, help=text)
    text = (
        "for a LoRA adapter of peft, its base model; for other checkpoints of a model of transformers, a "
        "folder with its config.json: safetensors and torch get the names and layouts of the Hub, the others "
        "those in memory"
    )
    made.add_argument("--base", metavar="DIR", help=text)
    text = "memory limit for tensors (default: %(default)s)"
    made.add_argument("--max_memory", default="1GB", metavar="SIZE", help=text)
    text = "maximum size of a weight file (default: %(default)s)"
    made.add_argument("--max_shard_size", default="10GB", metavar="SIZE", help=text)
    text = "show what would be read and written, but write nothing"
    made.add_argument("--dry_run", action="store_true", help=text)
    made.add_argument("--quiet", "-q", action="store_true", help="print nothing on success")
    return made


COMMAND = Subcommand(
    "accel_convert.command",
    "Write a checkpoint in another format.",
    "accel_convert.arguments:make_parser",
    imports_torch=True,
)
