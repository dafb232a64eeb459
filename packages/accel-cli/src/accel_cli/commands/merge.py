"""`accel merge-weights`: merge a sharded checkpoint into full weights."""

from __future__ import annotations

from argparse import Namespace

from accel_cli.output import show, working
from accel_state.errors import SettingsError
from accel_state.files import any_path
from accel_train.checkpoint.single_files import merge_fsdp_weights


def run(options: Namespace) -> int:
    """Merge a checkpoint."""
    source = any_path(options.checkpoint_directory, "argument checkpoint_directory")
    target = any_path(options.output_path, "argument output_path")
    if not source.is_dir():
        raise SettingsError(f"argument checkpoint_directory: the folder {str(source)!r} does not exist.")
    try:
        with working(f"merging {str(source)!r}"):
            merge_fsdp_weights(
                str(source),
                str(target),
                safe_serialization=not options.unsafe_serialization,
                remove_checkpoint_dir=options.remove_checkpoint_dir,
            )
    except OSError as error:
        raise SettingsError(f"argument output_path: {str(target)!r} cannot be written: {error}") from None
    if not options.quiet:
        show(f"wrote the weights to {str(target)!r}")
    return 0
