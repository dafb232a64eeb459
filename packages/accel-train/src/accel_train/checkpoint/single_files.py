"""The documented functions that save, load or merge single files and folders, without a commit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel
from accel_ops.weights.layout import SAFE_WEIGHTS_NAME, WEIGHTS_NAME
from accel_ops.weights.safetensors_io import SafetensorsFile, create_safetensors
from accel_ops.weights.write import save
from accel_plugins import sharding
from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin, form_of
from accel_plugins.optimizer import without_wrapper
from accel_plugins.sharding.folder import TensorMetadata
from accel_plugins.sharding.state import INDEX_NAME, StateForm, is_sharded_folder, strip_wrapper_prefixes
from accel_plugins.unsharded import with_offloaded_weights
from accel_state import runtime
from accel_state.errors import CheckpointError, CheckpointWriteError, SettingsError, some_of
from accel_state.files import any_path, local_path
from accel_state.logging import get_logger
from accel_state.partial_state import PartialState
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint import layout
from accel_train.checkpoint.agreement import raising_everywhere
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.files import make_folder, move, remove, write_file
from accel_train.checkpoint.layout import MODEL_KEY, read_manifest
from accel_train.checkpoint.load import (
    CheckpointReader,
    Shards,
    position_restores,
    restore_model_shards,
    restore_optimizer_shards,
    restore_rng,
    step_of,
    with_tied_names,
)
from accel_train.checkpoint.save import rank_files, shard_files, shared_files
from accel_train.checkpoint.staging import location_of, read_object, write_object

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer

logger = get_logger(__name__)


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

    There is no manifest, so that `load_state` verifies no checksums. `Accelerator.save_state` does more: it
    commits the files of all ranks at once.

    Args:
        output_dir: The folder; created if absent.
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
    current = runtime.active
    target = local_path(output_dir, "output_dir")
    make_folder(target)
    writes = current.topology.is_local_main if save_on_each_node else process_index == 0
    if writes:
        remove(target / layout.MANIFEST_NAME)  # of a checkpoint whose files are replaced
    files = rank_files(dataloaders, rank=process_index, device=current.device, step=step)
    states = [optimizer.state_dict() for optimizer in optimizers]
    if writes:
        of_scaler = {} if scaler is None else scaler.state_dict()
        files += shared_files(
            model_states, states, schedulers, dataloaders, of_scaler, safe=safe_serialization
        )
    for name, state, write in files:
        _write(target / name, partial(write, state))
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
        map_location: The device to which optimizer states are read first: `"cpu"`, `"on_device"` or a device.
        load_kwargs: More arguments of `torch.load`.
        **load_model_func_kwargs: More arguments of `Module.load_state_dict`.

    Returns:
        The state of the accelerator itself: `{"step": …}`.

    Raises:
        CheckpointError: A file is absent or damaged, or holds objects that are unsafe to load.
    """
    current = runtime.active
    folder = local_path(input_dir, "input_dir")
    source = CheckpointReader(
        folder=folder,
        manifest=read_manifest(folder),
        rank=process_index,
        world_size=current.topology.world_size,
        device=current.device,
        map_location=location_of(map_location, current.device),
        options=load_kwargs or {},
    )
    for index, model in enumerate(models):
        weights = source.read(source.weights_name(index))
        model.load_state_dict(with_tied_names(weights, model), **load_model_func_kwargs)
    for index, optimizer in enumerate(optimizers):
        optimizer.load_state_dict(source.read(layout.optimizer_name(index)))
    for index, scheduler in enumerate(schedulers):
        scheduler.load_state_dict(source.read(layout.scheduler_name(index)))
    if scaler is not None:
        scaler.load_state_dict(source.read(layout.SCALER_NAME))
    for resume in position_restores(source, dataloaders):
        resume()
    restore_rng(source, *source.random_states())
    return {"step": step_of(source)}


def save_custom_state(
    obj: Any, path: str | os.PathLike[str], index: int = 0, save_on_each_node: bool = False
) -> None:
    """Save the state of an object as `<path>/custom_checkpoint_<index>.pkl`, on the main process.

    Args:
        obj: An object with `state_dict`.
        path: A folder.
        index: Number of the object.
        save_on_each_node: Whether one process of every host saves.
    """
    topology = runtime.active.topology
    if topology.is_local_main if save_on_each_node else topology.is_main:
        file = local_path(path, "path") / layout.custom_name(index)
        _write(file, partial(write_object, obj.state_dict()))


def load_custom_state(obj: Any, path: str | os.PathLike[str], index: int = 0) -> None:
    """Load a file of `save_custom_state`.

    Args:
        obj: An object with `load_state_dict`.
        path: The folder.
        index: Number of the object.

    Raises:
        CheckpointError: The file holds more than tensors and plain containers, or is damaged.
    """
    obj.load_state_dict(read_object(local_path(path, "path") / layout.custom_name(index)))


def _write(path: Path, write: Callable[[Any], object]) -> None:
    """Write to a temporary file, then rename it."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        write_file(temporary, write, to_disk=True)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    move(temporary, path)


def save_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a model in the form of the plugin's `state_dict_type`. Call it on every process.

    Args:
        fsdp_plugin: Its `state_dict_type` chooses a file, or a folder that all ranks write.
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model.
        output_dir: The folder; created if absent.
        model_index: Number of the model, part of the name.
        adapter_only: Whether only the adapter of a PEFT model is saved. Other models are saved in full.
        use_dcp: Has no effect, as shards always go to a folder that any number of ranks can read; a warning
            says so.
    """
    run, folder = _run_of(accelerator, use_dcp=use_dcp), local_path(output_dir, "output_dir")
    states = run.strategy.states
    if form_of(fsdp_plugin) is StateForm.FULL:
        with raising_everywhere(run.main, *_SAVING):
            state = states.full_state_dict(model, keep=run.rank == 0)
            make_folder(folder)
            save(_adapter_of(model, state, adapter_only), folder / layout.fsdp_weights_name(model_index))
    else:
        state = _adapter_of(model, states.model_tensors(model), adapter_only)
        _write_folder(run, folder / layout.sharded_model_name(model_index), model=state)
    accelerator.wait_for_everyone()


def load_fsdp_model(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a model that `save_fsdp_model` has saved. Call it on every process.

    Args:
        fsdp_plugin: Its `state_dict_type` chooses the form.
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model.
        input_dir: The folder that was saved to; for shards also the folder of the shards.
        model_index: Number of the model.
        adapter_only: Whether only the adapter of a PEFT model was saved.
        use_dcp: As for `save_fsdp_model`.

    Raises:
        CheckpointError: There is no such model, or it does not fit.
    """
    run, folder = _run_of(accelerator, use_dcp=use_dcp), local_path(input_dir, "input_dir")
    strict = {"strict": False} if adapter_only and _has_adapter(model) else {}
    if form_of(fsdp_plugin) is StateForm.FULL:
        with raising_everywhere(run.main, "load_fsdp_model()"):
            state: Any = _read_file(folder / layout.fsdp_weights_name(model_index))
        run.strategy.states.load_full_state_dict(model, state, **strict)
    else:
        with raising_everywhere(run.main, "load_fsdp_model()"):
            source = _shards_in(folder, layout.sharded_model_name(model_index))
        restore_model_shards(run, source, model, **strict)
    accelerator.wait_for_everyone()


def save_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save an optimizer in the form of the plugin's `state_dict_type`. Call it on every process.

    Args:
        fsdp_plugin: Its `state_dict_type` chooses the form.
        accelerator: The `Accelerator` that has prepared the optimizer.
        optimizer: The prepared optimizer.
        model: The prepared model that it trains.
        output_dir: The folder; created if absent.
        optimizer_index: Number of the optimizer, part of the name.
        use_dcp: As for `save_fsdp_model`.
    """
    run, folder = _run_of(accelerator, use_dcp=use_dcp), local_path(output_dir, "output_dir")
    states, inner = run.strategy.states, without_wrapper(optimizer)
    if form_of(fsdp_plugin) is StateForm.FULL:
        with raising_everywhere(run.main, *_SAVING):
            state = states.full_optimizer_state(inner, [model], keep=run.rank == 0)
            make_folder(folder)
            save(state, folder / layout.optimizer_name(optimizer_index))
    else:
        state = states.optimizer_tensors(inner, [model])
        _write_folder(run, folder / layout.sharded_optimizer_name(optimizer_index), optimizer=state)
    accelerator.wait_for_everyone()


def load_fsdp_optimizer(
    fsdp_plugin: FullyShardedDataParallelPlugin,
    accelerator: Any,
    optimizer: Optimizer,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load an optimizer that `save_fsdp_optimizer` has saved. Call it on every process.

    Args:
        fsdp_plugin: Its `state_dict_type` chooses the form.
        accelerator: The `Accelerator` that has prepared the optimizer.
        optimizer: The prepared optimizer.
        model: The prepared model that it trains.
        input_dir: The folder that was saved to; for shards also the folder of the shards.
        optimizer_index: Number of the optimizer.
        adapter_only: Without effect: an optimizer has the states of the parameters that it trains.
        use_dcp: As for `save_fsdp_model`.

    Raises:
        CheckpointError: There is no such optimizer, or it has other parameters.
    """
    del adapter_only
    run, folder = _run_of(accelerator, use_dcp=use_dcp), local_path(input_dir, "input_dir")
    inner = without_wrapper(optimizer)
    if form_of(fsdp_plugin) is StateForm.FULL:
        with raising_everywhere(run.main, "load_fsdp_optimizer()"):
            state: Any = _read_file(folder / layout.optimizer_name(optimizer_index))
        run.strategy.states.load_full_optimizer_state(inner, [model], state)
    else:
        with raising_everywhere(run.main, "load_fsdp_optimizer()"):
            source = _shards_in(folder, layout.sharded_optimizer_name(optimizer_index))
        restore_optimizer_shards(run, source, inner)
    accelerator.wait_for_everyone()


_SAVING = "save_fsdp_*()", CheckpointWriteError


def _run_of(accelerator: Any, *, use_dcp: bool) -> CheckpointContext:
    """Return the objects of an accelerator that shards models."""
    run: CheckpointContext = accelerator._parts.checkpoints
    if not use_dcp:
        logger.warning_once("use_dcp=False has no effect: shards go to a folder that any run can read.")
    if not run.strategy.states.is_sharded:
        raise SettingsError(
            f"The strategy {run.strategy.name!r} does not shard anything. Use save_state() and "
            "load_state(), which work under every strategy."
        )
    return run


def _write_folder(run: CheckpointContext, folder: Path, **state: Any) -> None:
    """Write the shards of this rank; when all ranks are done, the main process writes the index."""
    with raising_everywhere(run.main, *_SAVING):
        make_folder(folder)
        if run.rank == 0:
            remove(folder / INDEX_NAME)  # an earlier save is no longer complete
    with raising_everywhere(run.main, *_SAVING):
        for file in shard_files(run, folder.name, **state):
            write_file(folder.parent / file.name, partial(file.write, file.state), to_disk=True)
    with raising_everywhere(run.main, *_SAVING):
        if run.rank == 0:
            sharding.folder.write_index(folder, range(run.runtime.topology.world_size))


def _has_adapter(model: nn.Module) -> bool:
    """Return whether a model is a PEFT model."""
    core: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    return getattr(core, "peft_config", None) is not None


def _adapter_of(model: nn.Module, state: Mapping[str, Any], adapter_only: bool) -> dict[str, Any]:
    """Return the weights of a PEFT model's active adapter if only these are wanted; else all weights."""
    if not adapter_only or not _has_adapter(model):
        return dict(state)
    core = extract_model_from_parallel(model, keep_torch_compile=False)
    trained = (name for name, parameter in core.named_parameters() if parameter.requires_grad)
    names = set(map(strip_wrapper_prefixes, trained))
    return {name: value for name, value in state.items() if strip_wrapper_prefixes(name) in names}


def _read_file(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"{str(path)!r} does not exist.")
    return read_object(path)


def _shards_in(path: Path, name: str) -> Shards:
    return Shards.of(path if is_sharded_folder(path) else path / name)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge a folder with the shards of a model into one weight file.

    Tensors are copied from file to file one at a time: the model need not fit into memory. With several
    processes, the main process merges, and all wait; if it fails, all raise its error.

    Args:
        checkpoint_dir: The folder `pytorch_model_fsdp_0`, or the checkpoint that contains it; or its URL.
        output_path: The folder of the new file, which is named `model.safetensors` or `pytorch_model.bin`; or
            its URL, to which the file is uploaded when it is merged on the disk.
        safe_serialization: Write safetensors; else as `torch.save` does.
        remove_checkpoint_dir: Whether to delete the shards when the file is complete.

    Raises:
        CheckpointError: There are no shards, or shards of several models or of an optimizer, or they are
            damaged.
        SettingsError: The file would be in the folder that is deleted, or its shards hold more than weights.
        OSError: There is no space for the file.
    """
    state = PartialState() if torch.distributed.is_initialized() else None
    failure: list[Exception | None] = [None]
    if state is None or state.is_main_process:
        try:
            shards = Shards.of(folder := _folder_of_model(any_path(checkpoint_dir, "checkpoint_dir")))
            target = any_path(output_path, "output_path")
            if remove_checkpoint_dir:
                _check_removable(shards, target)
            _merge(shards, target, safe=safe_serialization)
            if remove_checkpoint_dir:
                folder.remove_tree() if isinstance(folder, RemotePath) else remove(folder)
        except Exception as error:  # noqa: BLE001 - all ranks wait for it
            failure = [error]
    if state is not None:
        runtime.current().collectives.broadcast_object_list(failure, 0)
    if failure[0] is not None:
        raise failure[0]


def _check_removable(shards: Shards, output_path: AnyPath) -> None:
    """Refuse to delete a folder of shards that the merged file would be in, or that holds more."""
    folder = shards.folder
    outer, inner = (str(each.resolve() if isinstance(each, Path) else each) for each in (folder, output_path))
    if f"{inner}/".startswith(f"{outer}/"):
        raise SettingsError(
            f"output_path={str(output_path)!r} is inside of the folder that remove_checkpoint_dir=True "
            "deletes: pass another one."
        )
    entries = sharding.folder.entries(shards.index)
    tables = {str(entry.path[0]) for entry in entries if len(entry.path) > 1}
    if MODEL_KEY in tables and len(tables) > 1:
        lost = some_of(sorted(map(repr, tables - {MODEL_KEY})))
        raise SettingsError(
            f"remove_checkpoint_dir=True would also delete {lost} in {str(folder)!r}, which the merged file "
            "does not hold: leave it out, and delete the folder yourself."
        )


def _merge(shards: Shards, target: AnyPath, *, safe: bool) -> None:
    """Merge shards into a file of a folder: beside it first, or on this machine for a store."""
    tensors = _weights_of(shards)
    make_folder(target)
    beside = target if isinstance(target, Path) else None
    with tempfile.TemporaryDirectory(prefix=".accel-merge-", dir=beside) as scratch:
        merged = Path(scratch) / SAFE_WEIGHTS_NAME
        rows = {
            name: (tuple(entry.shape), entry.dtype)
            for name, entry in tensors.items()
            if entry.shape is not None and entry.dtype is not None
        }
        mapped = create_safetensors(merged, rows)
        targets = {entry.key: mapped[name] for name, entry in tensors.items()}
        sharding.folder.read_into(shards.folder, targets, shards.index, flat=True)
        del mapped, targets
        if not safe:  # each tensor with a storage of its own: torch refuses one of several types
            file, merged = SafetensorsFile(merged), Path(scratch) / WEIGHTS_NAME
            torch.save({name: file.tensor(name) for name in tensors}, merged)
            del file
        if isinstance(target, Path):
            move(merged, target / merged.name)
        else:
            (target / merged.name).upload(merged)


def _folder_of_model(source: AnyPath) -> AnyPath:
    """Find the folder with the shards of the only model."""
    if is_sharded_folder(source):
        return source
    paths = sorted(source.glob(f"{layout.FSDP_MODEL_NAME}_*"), key=str)
    inside = [path for path in paths if is_sharded_folder(path)]
    if len(inside) == 1:
        return inside[0]
    if not inside:
        raise CheckpointError(
            f"{str(source)!r} contains no shards of a model. Pass the folder "
            f"{layout.sharded_model_name(0)!r} of a checkpoint that was saved with SHARDED_STATE_DICT."
        )
    raise CheckpointError(
        f"{str(source)!r} holds the shards of {len(inside)} models: pass one of "
        f"{', '.join(repr(str(path)) for path in inside)}."
    )


def _weights_of(shards: Shards) -> dict[str, TensorMetadata]:
    """Return the weights in a folder of shards by name: those under "model", if there is such a table."""
    entries = sharding.folder.entries(shards.index)
    below = [entry for entry in entries if entry.path[0] == MODEL_KEY and len(entry.path) > 1]
    if not below and any("param_groups" in entry.path[:2] for entry in entries):
        raise CheckpointError(
            f"{str(shards.folder)!r} holds the state of an optimizer, which load_state() reads as it is. "
            f"Pass the folder of the model, such as {layout.sharded_model_name(0)!r}."
        )
    names = ((entry.path[1:] if below else entry.path, entry) for entry in below or entries)
    return {".".join(map(str, path)): entry for path, entry in names if entry.shape is not None}


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model on the CPU, offloaded weights included; those on the disk are mapped.

    Args:
        model: A model with the hooks of `cpu_offload`, `disk_offload` or `dispatch_model`, or without any.

    Raises:
        CheckpointError: A tensor is on the meta device, and no hook keeps its values.
    """
    state = with_offloaded_weights(model.state_dict(), model)
    return {name: value.to("cpu") if isinstance(value, Tensor) else value for name, value in state.items()}
