"""Check checkpoints of other libraries, which have no manifest, for truncated files."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

from accel_ops.weights.names import SAFETENSORS_SUFFIX
from accel_ops.weights.safetensors_file import SafetensorsFile
from accel_plugins.dcp.layout import INDEX_NAME, is_sharded_folder
from accel_plugins.deepspeed.folder import is_engine_folder
from accel_state.errors import CheckpointError
from accel_train.checkpoint import layout

if TYPE_CHECKING:
    from pathlib import Path

_ZIP = b"PK\x03\x04"


def check_foreign(folder: Path) -> None:
    """Check that there is a checkpoint, and that none of its files is truncated."""
    names = sorted(entry.name for entry in folder.iterdir() if layout.is_of_checkpoint(entry.name))
    folders = [
        entry for entry in folder.iterdir() if entry.is_dir() and layout.is_folder_of_checkpoint(entry.name)
    ]
    if not names and not folders:
        raise CheckpointError(
            f"{str(folder)!r} is no checkpoint: it has neither {layout.MANIFEST_NAME!r} nor any file that a "
            "checkpoint consists of."
        )
    for name in names:
        if name in layout.ENGINE_ROOT_FILES:
            continue
        if name.endswith(SAFETENSORS_SUFFIX):
            SafetensorsFile(folder / name)
        else:
            _check_saved(folder / name)
    for one in folders:
        if not is_sharded_folder(one) and not is_engine_folder(one):
            raise CheckpointError(
                f"{str(one)!r} is not whole: it has no {INDEX_NAME!r}, which comes when all ranks are done."
            )


def _check_saved(path: Path) -> None:
    with path.open("rb") as file:
        has_zip_header = file.read(len(_ZIP)) == _ZIP
    # What torch wrote before version 1.6 is no zip file, and cannot be judged from outside.
    if path.stat().st_size == 0 or (has_zip_header and not zipfile.is_zipfile(path)):
        raise CheckpointError(f"{str(path)!r} is not whole: it was cut off while it was written.")
