"""Parser of `accel merge-weights`."""

from __future__ import annotations

from accel_cli.commands.arguments.parser import Parser


def parser() -> Parser:
    """Build the parser."""
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
