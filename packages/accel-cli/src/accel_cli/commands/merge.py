"""`accel merge-weights`: merge a sharded checkpoint into full weights."""

from __future__ import annotations

from argparse import Namespace

from accel_cli.output import show, working
from accel_ops.weights.layout import convert_bytes
from accel_state.errors import SettingsError
from accel_state.files import any_path
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint.single_files import merge_fsdp_weights


def run(options: Namespace) -> int:
    """Merge a checkpoint."""
    source = any_path(options.checkpoint_directory, "argument checkpoint_directory")
    target = any_path(options.output_path, "argument output_path")
    if not source.is_dir():
        raise SettingsError(f"argument checkpoint_directory: the folder {str(source)!r} does not exist.")
    before = _files(target)
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
        new = {path: size for path, size in _files(target).items() if before.get(path) != size}
        show(*(f"wrote {str(path)!r}, {convert_bytes(size[0])}" for path, size in new.items()))
    return 0


def _files(folder: AnyPath) -> dict[AnyPath, tuple[int, int]]:
    """Return size and modification time (or version) of a folder's files."""
    if isinstance(folder, RemotePath):
        return {folder / name: (size, (folder / name).version()) for name, size in folder.sizes().items()}
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()] if folder.is_dir() else []
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}
