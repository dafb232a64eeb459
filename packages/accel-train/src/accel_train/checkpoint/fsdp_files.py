"""The documented functions that save and load one sharded model or optimizer, file by file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ops.modules import extract_model_from_parallel
from accel_ops.weights.write import save
from accel_plugins import dcp
from accel_plugins.dcp.layout import is_sharded_folder
from accel_plugins.dcp.local import LocalFiles
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.tensors import plain_name
from accel_plugins.fsdp.fields import form_of
from accel_state.errors import CheckpointError, SettingsError
from accel_train.checkpoint import layout
from accel_train.checkpoint.encode import read_object
from accel_train.checkpoint.files import make_folder, remove, write_file
from accel_train.checkpoint.sharded import (
    MODEL_KEY,
    OPTIMIZER_KEY,
    parts_of_folder,
    restore_model_shards,
    restore_optimizer_shards,
)
from accel_train.optimizer import AcceleratedOptimizer

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import nn
    from torch.optim import Optimizer

    from accel_plugins.dcp.protocol import ShardedStates
    from accel_plugins.fsdp.plugin import FullyShardedDataParallelPlugin
    from accel_plugins.roles import Persister
    from accel_state.topology import Topology
    from accel_train.checkpoint.run import Run


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
        fsdp_plugin: Has the form: one file, a folder to which every rank writes, or one file per rank.
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model.
        output_dir: The folder; made if absent.
        model_index: Number of the model, part of the name.
        adapter_only: Whether only the adapter of a PEFT model is saved. Other models are saved in full.
        use_dcp: Whether shards go to a folder that any number of ranks can read; else every rank writes a
            file for itself.
    """
    access = _Access(accelerator, fsdp_plugin, use_dcp=use_dcp)
    folder = _made(output_dir)
    if access.form is StateForm.FULL:
        state = access.persister.full_state_dict(model, keep=access.topology.is_main)
        save(_adapter_of(model, state, adapter_only), folder / layout.fsdp_weights_name(model_index))
    elif access.form is StateForm.NATIVE:
        access.local.save_model(model, folder, model_index)
    else:
        state = _adapter_of(model, access.shards.model_tensors(model), adapter_only)
        target = folder / layout.sharded_model_name(model_index)
        _write_folder(access, accelerator, target, {MODEL_KEY: state})
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
    """Load what `save_fsdp_model` has saved. Call it on every process.

    Args:
        fsdp_plugin: Has the form.
        accelerator: The `Accelerator` that has prepared the model.
        model: The prepared model.
        input_dir: The folder; of shards also the one that they are in.
        model_index: Number of the model.
        adapter_only: Whether only the adapter of a PEFT model was saved.
        use_dcp: As it was when the model was saved.

    Raises:
        CheckpointError: There is no such model, or it does not fit.
    """
    access = _Access(accelerator, fsdp_plugin, use_dcp=use_dcp)
    folder = Path(input_dir)
    strict = {"strict": False} if adapter_only and _has_adapter(model) else {}
    if access.form is StateForm.FULL:
        state: Any = read_object(_existing(folder / layout.fsdp_weights_name(model_index)))
        access.persister.load_full_state_dict(model, state, **strict)
    elif access.form is StateForm.NATIVE:
        access.local.load_model(model, folder, model_index)
    else:
        source = _folder(folder, layout.sharded_model_name(model_index))
        restore_model_shards(access.run, source, model, **strict)
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
        fsdp_plugin: Has the form.
        accelerator: The `Accelerator` that has prepared the optimizer.
        optimizer: The prepared optimizer.
        model: The prepared model that it trains.
        output_dir: The folder; made if absent.
        optimizer_index: Number of the optimizer, part of the name.
        use_dcp: As for `save_fsdp_model`.
    """
    access = _Access(accelerator, fsdp_plugin, use_dcp=use_dcp)
    folder, inner = _made(output_dir), _inner(optimizer)
    if access.form is StateForm.FULL:
        state = access.persister.full_optimizer_state(inner, [model], keep=access.topology.is_main)
        save(state, folder / layout.optimizer_name(optimizer_index))
    elif access.form is StateForm.NATIVE:
        access.local.save_optimizer(inner, model, folder, optimizer_index)
    else:
        state = access.shards.optimizer_tensors(inner, [model])
        target = folder / layout.sharded_optimizer_name(optimizer_index)
        _write_folder(access, accelerator, target, {OPTIMIZER_KEY: state})
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
    """Load what `save_fsdp_optimizer` has saved. Call it on every process.

    Args:
        fsdp_plugin: Has the form.
        accelerator: The `Accelerator` that has prepared the optimizer.
        optimizer: The prepared optimizer.
        model: The prepared model that it trains.
        input_dir: The folder; of shards also the one that they are in.
        optimizer_index: Number of the optimizer.
        adapter_only: An optimizer has the state of the parameters that it trains, an adapter's or others:
            nothing is different.
        use_dcp: As it was when the optimizer was saved.

    Raises:
        CheckpointError: There is no such optimizer, or it is of other parameters.
    """
    del adapter_only
    access = _Access(accelerator, fsdp_plugin, use_dcp=use_dcp)
    folder, inner = Path(input_dir), _inner(optimizer)
    if access.form is StateForm.FULL:
        state: Any = read_object(_existing(folder / layout.optimizer_name(optimizer_index)))
        access.persister.load_full_optimizer_state(inner, [model], state)
    elif access.form is StateForm.NATIVE:
        access.local.load_optimizer(inner, model, folder, optimizer_index)
    else:
        source = _folder(folder, layout.sharded_optimizer_name(optimizer_index))
        restore_optimizer_shards(access.run, source, inner)
    accelerator.wait_for_everyone()


class _Access:
    """The parts of an accelerator's strategy that these functions use."""

    def __init__(self, accelerator: Any, plugin: FullyShardedDataParallelPlugin, *, use_dcp: bool) -> None:
        parts = accelerator._parts
        form = form_of(plugin)
        self.form = StateForm.NATIVE if form is StateForm.SHARDED and not use_dcp else form
        self.run: Run = parts.checkpoints
        self.persister: Persister = parts.strategy.persister
        self.topology: Topology = parts.process.runtime.topology
        if parts.strategy.shards is None:
            raise SettingsError(
                f"The strategy {parts.strategy.name!r} shards nothing; use save_state() and load_state(), "
                "which work under every strategy."
            )
        self.shards: ShardedStates = parts.strategy.shards
        self.local = LocalFiles(shards=self.shards, topology=self.topology)


def _write_folder(access: _Access, accelerator: Any, folder: Path, state: Mapping[str, Any]) -> None:
    """Write the shards of this rank; after all ranks, the main process writes the index."""
    make_folder(folder)
    if accelerator.is_main_process:
        for path in folder.iterdir():
            remove(path)  # of an earlier save, of perhaps more ranks
    accelerator.wait_for_everyone()
    for part in parts_of_folder(access.run, folder.name, state):
        write_file(folder.parent / part.name, part.write_to, to_disk=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        dcp.write_index(folder, range(accelerator.num_processes))


def _has_adapter(model: nn.Module) -> bool:
    """Whether a model is a PEFT model."""
    core: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    return getattr(core, "peft_config", None) is not None


def _adapter_of(model: nn.Module, state: Mapping[str, Any], adapter_only: bool) -> dict[str, Any]:
    """Return the weights of a PEFT model's active adapter if only these are wanted; else all."""
    if not adapter_only or not _has_adapter(model):
        return dict(state)
    core = extract_model_from_parallel(model, keep_torch_compile=False)
    names = {name for name, parameter in core.named_parameters() if parameter.requires_grad}
    return {name: value for name, value in state.items() if plain_name(name) in {*map(plain_name, names)}}


def _inner(optimizer: Any) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer


def _made(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder)
    make_folder(path)
    return path


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise CheckpointError(f"There is no {str(path)!r}.")
    return path


def _folder(path: Path, name: str) -> Path:
    return path if is_sharded_folder(path) else path / name
