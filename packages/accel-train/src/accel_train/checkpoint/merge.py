"""Merge the shards of a model into one weight file."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import torch

from accel_ops.weights.names import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel_ops.weights.stream import create_safetensors
from accel_plugins import dcp
from accel_plugins.dcp.layout import is_sharded_folder
from accel_state.errors import CheckpointError
from accel_state.local_path import local_path
from accel_state.partial_state import PartialState
from accel_train.checkpoint import layout
from accel_train.checkpoint.files import make_folder, move, remove

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from accel_plugins.dcp import Entry

logger = logging.getLogger(__name__)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge a folder with the shards of a model into one weight file.

    Tensors go from file to file one after the other: the model need not fit into memory. With several
    processes, the main one does it, and all wait.

    Args:
        checkpoint_dir: The folder `pytorch_model_fsdp_0`, or the checkpoint that it is in.
        output_path: The folder of the new file, which is named `model.safetensors` or `pytorch_model.bin`.
        safe_serialization: Write safetensors; else as `torch.save` does.
        remove_checkpoint_dir: Whether to delete the shards when the file is complete.

    Raises:
        CheckpointError: There are no shards, or those of several models, or they are damaged.
        OSError: There is no room for the file.
    """
    state = PartialState() if torch.distributed.is_initialized() else None
    if state is None or state.is_main_process:
        folder = _folder_of_model(local_path(checkpoint_dir, "checkpoint_dir"))
        name = SAFE_WEIGHTS_NAME if safe_serialization else WEIGHTS_NAME
        target = local_path(output_path, "output_path") / name
        _merge(folder, target, safe=safe_serialization)
        if remove_checkpoint_dir:
            remove(folder)
    if state is not None:
        state.wait_for_everyone()


def _merge(folder: Path, target: Path, *, safe: bool) -> None:
    tensors = {
        name: entry for entry in dcp.entries(dcp.read_index(folder)) if (name := _name(entry)) is not None
    }
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        rows = {
            name: (tuple(entry.shape), entry.dtype)
            for name, entry in tensors.items()
            if entry.shape is not None and entry.dtype is not None
        }
        mapped = create_safetensors(temporary, rows)
        dcp.read_into(folder, {entry.key: mapped[name] for name, entry in tensors.items()}, flat=True)
        if not safe:
            temporary_bin = temporary.with_suffix(".bin")
            torch.save(mapped, temporary_bin)
            remove(temporary)
            temporary = temporary_bin
        del mapped
        move(temporary, target)
    finally:
        remove(temporary)


def _folder_of_model(source: Path) -> Path:
    """Find the folder with the shards of one model."""
    if is_sharded_folder(source):
        return source
    inside = [path for path in sorted(source.glob(f"{layout.FSDP_MODEL_NAME}_*")) if is_sharded_folder(path)]
    if len(inside) == 1:
        return inside[0]
    if not inside:
        raise CheckpointError(
            f"{str(source)!r} holds no shards of a model: pass the folder "
            f"{layout.sharded_model_name(0)!r} of a checkpoint that was saved with SHARDED_STATE_DICT."
        )
    raise CheckpointError(
        f"{str(source)!r} holds the shards of {len(inside)} models: pass one of "
        f"{', '.join(repr(str(path)) for path in inside)}."
    )


def _name(entry: Entry) -> str | None:
    """Return the name of a weight; `None` for other entries."""
    if entry.shape is None:
        return None
    path = entry.path if entry.path[0] != "model" or len(entry.path) == 1 else entry.path[1:]
    return ".".join(map(str, path))
