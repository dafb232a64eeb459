"""The documented functions that save and load single files of a checkpoint, without its guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state import runtime
from accel_train.checkpoint import layout
from accel_train.checkpoint.apply import (
    Source,
    restore_model,
    restore_positions,
    restore_rng,
    restore_states,
    step_of,
)
from accel_train.checkpoint.contents import Contents, rank_files, shared_parts
from accel_train.checkpoint.encode import read_object, write_object
from accel_train.checkpoint.files import make_folder, move, write_file
from accel_train.checkpoint.folder import read_manifest
from accel_train.checkpoint.manifest import FileRecord, Manifest

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.amp.grad_scaler import GradScaler


def save_accelerator_state(
    output_dir: str | os.PathLike[str],
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write this rank's files of a checkpoint.

    The manifest lists what the main process wrote. `Accelerator.save_state` does more: it commits the files
    of all ranks at once.

    Args:
        output_dir: The folder; made if absent.
        model_states: The state dict of every model.
        optimizers: In the order of preparation.
        schedulers: In the order of preparation.
        dataloaders: Prepared ones.
        process_index: Rank of this process.
        step: Micro-batches since the last optimizer step.
        scaler: The loss scaler.
        save_on_each_node: Whether one process of every host writes what all share.
        safe_serialization: Write weights as safetensors; else as `torch.save` does.

    Returns:
        The folder.
    """
    current = runtime.current_or_single()
    target = Path(output_dir)
    make_folder(target)
    contents = Contents(
        weights=model_states,
        optimizers=[one.state_dict() for one in optimizers],
        schedulers=schedulers,
        dataloaders=dataloaders,
        scaler={} if scaler is None else scaler.state_dict(),
    )
    writes = current.topology.is_local_main if save_on_each_node else process_index == 0
    shared = shared_parts(contents, safe=safe_serialization) if writes else []
    records = {
        part.name: _write(target / part.name, part.write_to)
        for part in [*shared, *rank_files(contents, rank=process_index, device=current.device)]
    }
    if writes:
        manifest = Manifest(world_size=current.topology.world_size, step=step, files=records)
        _write(target / layout.MANIFEST_NAME, lambda sink: sink.write(manifest.to_text().encode()))
    return target


def load_accelerator_state(
    input_dir: str | os.PathLike[str],
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: GradScaler | None = None,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read a checkpoint into objects; files are not verified.

    Args:
        input_dir: The folder.
        models: The unwrapped models.
        optimizers: In the order of preparation.
        schedulers: In the order of preparation.
        dataloaders: Prepared ones.
        process_index: Rank of this process.
        scaler: The loss scaler.
        map_location: Where the states of optimizers are read to first: `"cpu"`, `"on_device"` or a device.
        load_kwargs: More arguments of `torch.load`.
        **load_model_func_kwargs: More arguments of `Module.load_state_dict`.

    Returns:
        What an accelerator has to remember: `{"step": …}`.

    Raises:
        CheckpointError: A file is absent or damaged, or holds what is not read without trust.
    """
    current = runtime.current_or_single()
    folder = Path(input_dir)
    source = Source(
        folder=folder,
        manifest=read_manifest(folder),
        rank=process_index,
        world_size=current.topology.world_size,
        device=current.device,
        map_location=current.device if map_location == "on_device" else map_location or "cpu",
        options=load_kwargs or {},
    )
    for index, model in enumerate(models):
        restore_model(source, index, model, **load_model_func_kwargs)
    restore_states(source, layout.optimizer_name, [one.load_state_dict for one in optimizers])
    restore_states(source, layout.scheduler_name, [one.load_state_dict for one in schedulers])
    if scaler is not None:
        scaler.load_state_dict(source.read(layout.SCALER_NAME))
    restore_positions(source, dataloaders)
    restore_rng(source)
    return {"step": step_of(source)}


def save_custom_state(
    obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Save the state of an object as `<path>/custom_checkpoint_<index>.pkl`, on the main process.

    Args:
        obj: With `state_dict`.
        path: A folder.
        index: Number of the object.
        save_on_each_node: Whether one process of every host saves.
    """
    topology = runtime.current_or_single().topology
    if topology.is_local_main if save_on_each_node else topology.is_main:
        _write(Path(path) / layout.custom_name(index), lambda sink: write_object(obj.state_dict(), sink))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load what `save_custom_state` has saved.

    Args:
        obj: With `load_state_dict`.
        path: The folder.
        index: Number of the object.

    Raises:
        CheckpointError: The file holds more than tensors and plain containers, or is damaged.
    """
    obj.load_state_dict(read_object(Path(path) / layout.custom_name(index)))


def _write(path: Path, write: Callable[[Any], object]) -> FileRecord:
    """Write to a temporary file, then rename it."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        record = write_file(temporary, write, to_disk=True)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    move(temporary, path)
    return record
