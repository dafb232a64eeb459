"""Load a checkpoint into a model, each tensor straight to where it belongs."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from accel_bigmodel.assign import Assignment, assign, plan_load
from accel_bigmodel.broadcast import broadcast_sources
from accel_bigmodel.device_map.check import check_device_map
from accel_bigmodel.device_map.infer import automatic_device_map
from accel_bigmodel.dispatch import dispatch_model
from accel_bigmodel.offload import offload_weight
from accel_bigmodel.offload_index import save_offload_index
from accel_bigmodel.placement import torch_dtype
from accel_bigmodel.report import FileReport, LoadReport, MemoryMeter, raw_rate
from accel_bigmodel.sources import open_checkpoint, stored_dtypes
from accel_ops.weights.read import device_of
from accel_ops.weights.sizes import convert_file_size_to_int
from accel_ops.weights.tied import check_tied_parameters_in_config, find_tied_parameters, retie_parameters
from accel_state.errors import SettingsError, UnsupportedError, some_of

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    import torch
    from torch import nn

    from accel_bigmodel.offload_index import Index

    Device = int | str | torch.device

_log = logging.getLogger(__name__)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Device] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Sequence[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Load a checkpoint into a model, tensor by tensor, each straight to its device.

    All names and shapes are checked before anything is changed. What stays on the CPU in its own type is
    mapped, not read; what goes to the disk stays in a safetensors checkpoint, and its place is noted in
    `offload_folder/index.json`. Tied weights stay tied, whichever of their names the checkpoint has.

    Args:
        model: The model, usually a meta model.
        checkpoint: A weight file, an index file, a folder with one of them, or the id of a model on the hub.
        device_map: Module or tensor name to device. Without one, tensors go where the model's are (the CPU
            for those on the meta device).
        offload_folder: Where weights for the disk are noted, or written if they come from a `.bin` file.
        dtype: The type of floating weights; by default that of the model's tensors. Without a device map,
            tensors of the model that have values keep their type.
        offload_state_dict: Put what the CPU cannot map (cast weights, old `.bin` files) into temporary files
            rather than in memory.
        offload_buffers: Whether buffers of modules on the disk are offloaded too.
        keep_in_fp32_modules: Modules whose weights are float32 whatever `dtype` says.
        offload_8bit_bnb: Refused: `accel_quant.load_and_quantize_model` loads quantised models, and keeps
            their 8-bit weights with their statistics wherever the device map sends them.
        strict: Refuse a checkpoint that lacks a tensor or has one too many; by default these are logged.
        full_state_dict: Whether the checkpoint holds full tensors; otherwise each rank's shards.
        broadcast_from_rank0: Let rank 0 read and send to the others; they need no file.

    Raises:
        CheckpointError: The checkpoint is damaged, unsafe, or does not fit the model; all that is wrong is
            named.
        SettingsError: The device map leaves tensors without a device, or weights for the disk have no folder.
        UnsupportedError: `offload_8bit_bnb` is True.
    """
    if offload_8bit_bnb:
        raise UnsupportedError(
            "offload_8bit_bnb=True: load_checkpoint_in_model loads weights as they are. For 8-bit weights "
            "with their statistics, load the model with load_and_quantize_model from accel_quant"
        )
    if device_map is not None:
        check_device_map(model, device_map)
    assignment = Assignment(
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=torch_dtype(dtype),
        spill=offload_state_dict,
        offload_buffers=offload_buffers,
        keep_in_fp32=tuple(keep_in_fp32_modules or ()),
        strict=strict,
        shards=not full_state_dict,
    )
    index = _load(model, checkpoint, assignment, broadcast=broadcast_from_rank0)
    if index and offload_folder is None:
        raise SettingsError(
            "the device_map sends weights to the disk: pass offload_folder, where that is noted"
        )
    if index and offload_folder is not None:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
        save_offload_index(index, offload_folder)


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: str | Mapping[str, Device] | None = None,
    max_memory: Mapping[int | str, float | str] | None = None,
    no_split_module_classes: str | Sequence[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    report: bool = False,
    memory_limit: int | str | None = None,
) -> nn.Module:
    """Load a checkpoint into a model and let it run across its devices.

    Args:
        model: The model, usually a meta model.
        checkpoint: A weight file, an index file, a folder with one of them, or the id of a model on the hub.
        device_map: Module or tensor name to device; or `"auto"`, `"balanced"`, `"balanced_low_0"` or
            `"sequential"` to have one made. Without one the weights are loaded and nothing is dispatched.
        max_memory: What each device may take when a map is made.
        no_split_module_classes: Classes whose modules stay whole when a map is made.
        offload_folder: Where weights for the disk are noted or written. A safetensors checkpoint needs
            none: its weights are read in place.
        offload_buffers: Whether buffers of offloaded modules are offloaded too.
        dtype: The type of floating weights; by default that of the model's tensors. Without a device map,
            tensors of the model that have values keep their type.
        offload_state_dict: Put what the CPU cannot map into temporary files; by default when part of the
            model is on the disk.
        skip_keys: Keyword arguments that are not moved between devices.
        preload_module_classes: Classes whose modules load everything below them at once.
        force_hooks: Attach hooks even where a single device needs none.
        strict: Refuse a checkpoint that lacks a tensor or has one too many.
        full_state_dict: Whether the checkpoint holds full tensors; otherwise each rank's shards.
        broadcast_from_rank0: Let rank 0 read and send to the others; they need no file.
        report: Measure, and leave a `LoadReport` in the model's `load_report`; it is logged too.
        memory_limit: A hard cap in bytes (or text like `"4GB"`): on what the load puts into host memory
            beside mapped files, and on the disk-offloaded weights that are in memory while the model runs.

    Raises:
        CheckpointError: The checkpoint is damaged, unsafe, or does not fit the model; all that is wrong is
            named.
        SettingsError: The map is unusable, or the memory limit cannot be kept.
    """
    if isinstance(device_map, str):
        device_map = automatic_device_map(
            device_map,
            model,
            max_memory,
            no_split_module_classes,
            offload_buffers,
            stored_dtypes=None if broadcast_from_rank0 else stored_dtypes(checkpoint),
            dtype=dtype,
        )
    limit = None if memory_limit is None else convert_file_size_to_int(memory_limit)
    if device_map is not None:
        check_device_map(model, device_map)
    on_disk = device_map is not None and "disk" in device_map.values()
    assignment = Assignment(
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=torch_dtype(dtype),
        spill=on_disk if offload_state_dict is None else offload_state_dict,
        offload_buffers=offload_buffers,
        strict=strict,
        shards=not full_state_dict,
        memory_limit=limit,
    )
    index = _load(model, checkpoint, assignment, broadcast=broadcast_from_rank0, measure=report)
    if device_map is None:
        return model
    _offload_unloaded(model, assignment, index)
    return dispatch_model(
        model,
        device_map=device_map,
        offload_dir=offload_folder if any("safetensors_file" not in row for row in index.values()) else None,
        offload_index=index,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        memory_limit=limit,
    )


def _offload_unloaded(model: nn.Module, assignment: Assignment, index: Index) -> None:
    """Write to the disk what a device map sends there, has values in the model, and no checkpoint gave."""
    loaded = {name for group in find_tied_parameters(model) if index.keys() & group for name in group}
    unloaded = {
        name: tensor
        for name, tensor in model.named_parameters()
        if name not in index
        and name not in loaded
        and not tensor.is_meta
        and device_of(name, assignment.device_map or {}) == "disk"
    }
    if unloaded and assignment.offload_folder is None:
        raise SettingsError(
            f"the device_map sends {some_of(unloaded)} to the disk, and the checkpoint has no values for "
            "them: pass offload_folder, where those of the model are written"
        )
    if unloaded:
        Path(str(assignment.offload_folder)).mkdir(parents=True, exist_ok=True)
    for name, tensor in unloaded.items():
        offload_weight(tensor.detach(), name, str(assignment.offload_folder), index)


def _load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    assignment: Assignment,
    *,
    broadcast: bool,
    measure: bool = False,
) -> Index:
    start = time.perf_counter()
    tied = find_tied_parameters(model)
    if not tied and check_tied_parameters_in_config(model):
        _log.warning(
            "The model's configuration ties its embeddings, the model does not: call tie_weights() first."
        )
    sources = broadcast_sources(checkpoint) if broadcast else open_checkpoint(checkpoint)
    plan = plan_load(model, sources, assignment, tied)
    meter = MemoryMeter()
    index: Index = {}
    files: list[FileReport] = []
    for source, steps in plan:
        began = time.perf_counter()
        strategies = assign(model, source, steps, assignment, index, meter.sample)
        taken = time.perf_counter() - began
        raw = raw_rate(source.path) if measure and not broadcast else None
        files.append(FileReport(path=source.path, strategies=strategies, seconds=taken, raw=raw))
    retie_parameters(model, tied)
    report = LoadReport(files=tuple(files), seconds=time.perf_counter() - start, peak=meter.peak)
    _log.info("%s", report)
    if measure:
        vars(model)["load_report"] = report
    return index
