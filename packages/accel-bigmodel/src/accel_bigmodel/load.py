"""Load a checkpoint into a model: `load_checkpoint_in_model`, `load_checkpoint_and_dispatch`; the report."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import field, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from accel_bigmodel.device_map import automatic_device_map, check_device_map
from accel_bigmodel.dispatch import dispatch_model
from accel_bigmodel.hooks import M
from accel_bigmodel.offload import load_offloaded_weight, offload_weight, save_offload_index
from accel_bigmodel.placement import (
    OffloadedParameter,
    as_parameter,
    model_tensors,
    owner_of,
    set_module_tensor_to_device,
    shared_names,
    torch_dtype,
)
from accel_bigmodel.sources import (
    ConvertedSource,
    Source,
    broadcast_sources,
    open_checkpoint,
    with_model_names,
)
from accel_ops.weights.layout import convert_bytes
from accel_ops.weights.read import device_of
from accel_ops.weights.tensors import (
    check_tied_parameters_in_config,
    get_non_persistent_buffers,
    retie_parameters,
)
from accel_state.errors import CheckpointMismatchError, SettingsError, UnsupportedError, some_of
from accel_state.frozen import frozen
from accel_state.platforms import can_replace_mapped

if TYPE_CHECKING:
    from accel_bigmodel.offload import Index

    Device = int | str | torch.device

_log = logging.getLogger(__name__)
_HOST_TYPES = ("cpu", "meta")
How = Literal["map", "cast", "read", "part", "pinned", "copy", "in place", "broadcast", "quantize"]
"""How a tensor is loaded: mapped; read and cast; read; only this rank's shard of it; through pinned buffers;
copied; left in its file; from rank 0; as a part of a quantised weight."""


class WeightQuantizer(Protocol):
    """Creates the weights of quantised layers from the tensors of a checkpoint."""

    def weight_of(self, name: str) -> str | None:
        """Return the name of the quantised weight that a tensor belongs to; `None` outside of such layers."""
        ...

    def quantize_parts(
        self, weight: str, parts: Mapping[str, Tensor], device: torch.device, *, where: str
    ) -> nn.Parameter:
        """Create a weight from a float tensor, or from packed numbers and statistics, by name in the file."""
        ...

    def with_numbers(self, parameter: nn.Parameter, numbers: Tensor) -> nn.Parameter:
        """Return a quantised weight with its packed numbers replaced by an equal tensor in other memory."""
        ...


@frozen
class Assignment:
    """The arguments of a load; see `load_checkpoint_in_model`."""

    device_map: Mapping[str, Device] | None = None
    offload_folder: str | os.PathLike[str] | None = None
    dtype: torch.dtype | None = None
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict[str, "torch.dtype"])
    spill: bool = False
    offload_buffers: bool = False
    quantizer: WeightQuantizer | None = None
    strict: bool = False
    shards: bool = False


@frozen
class AssignStep:
    """The load plan of a tensor of the model, or of a part of it: `key` in the file, cast to `dtype`."""

    name: str
    key: str
    device: Device | None
    dtype: torch.dtype
    nbytes: int
    how: How


Plan = list[tuple["Source", list[AssignStep]]]


def plan_load(
    model: nn.Module,
    sources: Sequence[Source],
    assignment: Assignment,
    tied: Sequence[Sequence[str]],
) -> Plan:
    """Match the tensors of a checkpoint, as transformers converts them, with a model, and plan the load.

    Raises:
        CheckpointMismatchError: Shapes differ; or, with `strict`, names are missing or unexpected.
    """
    wanted = model_tensors(model)
    if not assignment.shards:
        sources = with_model_names(model, sources, wanted)
    quantizer = assignment.quantizer
    aliases = _aliases(tied, {*chain(*(source.tensors for source in sources))}, assignment) if tied else {}
    seen: set[str] = set()
    plan: Plan = []
    misshaped: list[str] = []
    unexpected: list[str] = []
    for source in sources:
        steps: list[AssignStep] = []
        for name, (shape, dtype) in source.tensors.items():
            target = wanted.get(name)
            weight = quantizer.weight_of(name) if quantizer is not None else None
            if weight is not None and (target is None or name == weight):
                seen.add(name)
                step = _step(weight, shape, dtype, wanted[weight], source, assignment)
                steps.append(replace(step, key=name, how="quantize"))
                continue
            if target is None:
                unexpected.append(name)
                continue
            if name in seen:
                continue
            seen.add(name)
            plain = type(target) in (torch.nn.Parameter, torch.Tensor) or hasattr(target, "device_mesh")
            if plain and tuple(target.shape) != shape and not assignment.shards:
                misshaped.append(
                    f"{name} ({list(shape)} in the checkpoint, {list(target.shape)} in the model)"
                )
                continue
            for served in (name, *aliases.get(name, ())):
                step = _step(served, shape, dtype, wanted[served], source, assignment)
                steps.append(replace(step, key=source.keys.get(name, name)))
        plan.append((source, steps))
    for group in tied:
        if seen.intersection(group):
            seen.update(group)
    missing = [name for name in wanted if name not in seen]
    if misshaped or missing or unexpected:
        _warn_mismatches(misshaped, missing, unexpected, assignment)
    return plan


def _aliases(
    tied: Sequence[Sequence[str]], stored: Container[str], assignment: Assignment
) -> dict[str, list[str]]:
    """Map tensors in files to tied ones that are in no file, but need a value beside theirs.

    These are all of those for the disk; and one for a device, if those in files are for the disk.
    """
    aliases: dict[str, list[str]] = {}
    for group in tied:
        on_disk = {name for name in group if device_of(name, assignment.device_map or {}) == "disk"}
        source = next((name for name in group if name in stored), None)
        if source is None or not on_disk:
            continue
        aliases[source] = [name for name in group if name in on_disk and name not in stored]
        if all(name in on_disk for name in group if name in stored):
            aliases[source] += [name for name in group if name not in on_disk][:1]
    return aliases


def assign(
    model: nn.Module,
    source: Source,
    steps: Sequence[AssignStep],
    assignment: Assignment,
    index: Index,
    parts: dict[str, dict[str, Tensor]],
) -> None:
    """Load one file's tensors to their devices.

    `parts` has the tensors of quantised weights that are still incomplete after the previous files.
    """
    quantizer, waiting = assignment.quantizer, Counter[str]()
    spilled = ""
    pinned: dict[torch.device, dict[str, torch.dtype]] = {}
    for step in steps:
        if step.how == "quantize":
            waiting[step.name] += 1
        if step.how == "pinned" and step.device is not None:
            pinned.setdefault(torch.device(step.device), {})[step.key] = step.dtype
    uploaded: dict[str, Tensor] = {}
    for device, dtypes in pinned.items():
        uploaded |= source.upload(dtypes, device)
    with contextlib.ExitStack() as folders:  # mapped files stay readable when their folder is removed
        for step in steps:
            if quantizer is not None and step.how == "quantize":
                key = source.keys.get(step.key, step.key)
                parts.setdefault(step.name, {})[step.key] = source.get(key)
                waiting[step.name] -= 1
                held = parts[step.name]
                weight = held.get(step.name)
                # The float weight, or the packed numbers with all statistics.
                is_complete = weight is not None and (weight.is_floating_point() or len(held) > 1)
                if not waiting[step.name] and is_complete:
                    _put_quantized(model, quantizer, source, step, parts.pop(step.name), assignment, index)
                continue
            if step.device == "disk":
                _to_disk(source, step, assignment, index)
                continue
            if step.how == "part":
                _put_part(model, source, step)
                continue
            value = uploaded.pop(step.key) if step.key in uploaded else source.get(step.key)
            is_in_memory = step.how in ("broadcast", "cast", "read") and str(step.device) == "cpu"
            if assignment.spill and is_in_memory and can_replace_mapped():
                spilled = spilled or folders.enter_context(tempfile.TemporaryDirectory(prefix="accel-spill-"))
                row = offload_weight(value.to(step.dtype), step.name, spilled)[step.name]
                value = load_offloaded_weight(Path(spilled) / f"{step.name}.dat", row)
            _put(model, step, value, assignment)


def _step(
    name: str,
    shape: tuple[int, ...],
    stored: torch.dtype,
    target: Tensor,
    source: Source,
    assignment: Assignment,
) -> AssignStep:
    device: Device | None = None
    is_buffer = not isinstance(target, nn.Parameter)
    if assignment.device_map is not None:
        device = device_of(name, assignment.device_map)
        if device == "disk" and is_buffer and not assignment.offload_buffers:
            device = "cpu"
    elif target.is_meta:
        device = "cpu"
    dtype = stored
    if stored.is_floating_point:
        dtype = assignment.dtypes.get(name) or assignment.dtype or target.dtype
    elif type(target) in (torch.nn.Parameter, torch.Tensor):
        dtype = target.dtype
    how: How = "map" if dtype == stored else "cast"
    if source.broadcast:
        how = "broadcast"
    elif device == "disk":
        how = "in place" if source.in_place else "read"
    elif hasattr(target, "device_mesh") and not assignment.shards:
        how, shape = "part", cast("Any", target).to_local().shape
    elif device is not None and torch.device(device).type not in _HOST_TYPES:
        how = "pinned" if source.in_place else "copy"
    elif device is None or not source.mapped:
        how = "read"
    return AssignStep(
        name=name,
        key=name,
        device=device,
        dtype=dtype,
        nbytes=math.prod(shape) * dtype.itemsize,
        how=how,
    )


def _put(model: nn.Module, step: AssignStep, value: Tensor, assignment: Assignment) -> None:
    owner, leaf = owner_of(model, step.name)
    table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
    target = table[leaf]
    if step.how == "map" and type(target) is torch.nn.Parameter and not vars(target):
        # The same as set_module_tensor_to_device, but a hundred times faster.
        table[leaf] = as_parameter(value, target)
    elif hasattr(target, "device_mesh"):
        tensors = import_module("torch.distributed.tensor")  # slow; only distributed parameters need it
        like = cast("Any", target)
        part = value.to(step.dtype).to(like.device_mesh.device_type)
        if assignment.shards:
            part = tensors.DTensor.from_local(part, like.device_mesh, like.placements)
        else:  # every rank has the full tensor: no communication
            part = tensors.distribute_tensor(part, like.device_mesh, like.placements, src_data_rank=None)
        if target.is_meta:
            table[leaf] = torch.nn.Parameter(part, requires_grad=target.requires_grad)
        else:
            target.detach().copy_(part)  # a sharded model keeps its parameter objects
    elif step.device is None:
        with torch.no_grad():
            target.copy_(value)
    else:
        set_module_tensor_to_device(
            model, step.name, step.device, value=value, dtype=step.dtype, clear_cache=False
        )


def _put_quantized(
    model: nn.Module,
    quantizer: WeightQuantizer,
    source: Source,
    step: AssignStep,
    parts: Mapping[str, Tensor],
    assignment: Assignment,
    index: Index,
) -> None:
    name = step.name
    device = torch.device("cpu" if step.device in (None, "disk") else step.device)
    parameter = quantizer.quantize_parts(name, parts, device, where=repr(str(source.path)))
    if step.device == "disk":
        folder = _offload_folder(step, source, assignment)
        offload_weight(parameter.data, name, folder, index)
        # The packed numbers are mapped from the disk; the statistics stay with the parameter.
        numbers = load_offloaded_weight(folder / f"{name}.dat", index[name])
        parameter = quantizer.with_numbers(parameter, numbers)
    owner, leaf = owner_of(model, name)
    owner._parameters[leaf] = parameter


def _put_part(model: nn.Module, source: Source, step: AssignStep) -> None:
    """Read this rank's shard of a tensor."""
    owner, leaf = owner_of(model, step.name)
    table: dict[str, Any] = owner._parameters if leaf in owner._parameters else owner._buffers
    target = table[leaf]
    dim, regions = import_module("accel_ops.weights.regions").regions_of(target)
    parts = [source.part(step.key, region) for region in regions]
    value = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    if target.is_meta:
        shard = import_module("torch.distributed.tensor").DTensor.from_local(
            value.to(step.dtype).to(target.device_mesh.device_type),
            target.device_mesh,
            target.placements,
            run_check=False,
            shape=target.shape,
            stride=target.stride(),
        )
        table[leaf] = torch.nn.Parameter(shard, requires_grad=target.requires_grad)
    else:
        target.detach().to_local().copy_(value)  # a sharded model keeps its parameter objects


def _to_disk(source: Source, step: AssignStep, assignment: Assignment, index: Index) -> None:
    if source.in_place and isinstance(source.path, Path):
        index[step.name] = {
            "safetensors_file": str(source.path.absolute()),
            "weight_name": step.key,
            "dtype": str(step.dtype).removeprefix("torch."),
        }
        return
    folder = _offload_folder(step, source, assignment)
    offload_weight(source.get(step.key).to(step.dtype), step.name, folder, index)


def _offload_folder(step: AssignStep, source: Source, assignment: Assignment) -> Path:
    if assignment.offload_folder is None:
        is_made = step.how == "quantize" or isinstance(source, ConvertedSource)
        remedy = "" if is_made else ", or save the checkpoint as safetensors"
        raise SettingsError(
            f"{step.name!r} goes to the disk and comes from {source.path.name!r}, which cannot be read in "
            f"place: pass offload_folder{remedy}"
        )
    folder = Path(assignment.offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _warn_mismatches(
    misshaped: list[str], missing: list[str], unexpected: list[str], assignment: Assignment
) -> None:
    lines = [
        f"{what}: {some_of(names, most=20)}"
        for what, names in (
            ("of another shape", misshaped),
            ("missing from the checkpoint", missing),
            ("unexpected in the checkpoint", unexpected),
        )
        if names
    ]
    if misshaped or (lines and assignment.strict) or (missing and assignment.quantizer is not None):
        raise CheckpointMismatchError(f"the checkpoint does not match the model. {'; '.join(lines)}")
    if unexpected:
        shown = some_of(unexpected, most=20)
        _log.warning("Some weights of the checkpoint were not used when loading the model: %s.", shown)
    if missing:
        _log.warning(
            "Some weights of the model are missing from the checkpoint: %s.", some_of(missing, most=20)
        )


@frozen
class LoadReport:
    """The seconds that a load took, and the bytes of the tensors by the way in which they were loaded."""

    seconds: float
    nbytes: Mapping[str, int]

    def __str__(self) -> str:
        ways = ", ".join(f"{convert_bytes(size)} {how}" for how, size in self.nbytes.items())
        return f"loaded {ways or 'nothing'} in {self.seconds:.3f} s"


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
    """Load a checkpoint into a model, tensor by tensor, each directly to its device.

    All names and shapes are checked before the model is changed. Tensors that stay on the CPU without a cast
    are mapped, not read; tensors for the disk stay in a safetensors checkpoint, with an entry in
    `offload_folder/index.json`. Tied weights stay tied, whichever of their names the checkpoint has.

    Args:
        model: The model, usually a meta model.
        checkpoint: A weight file, an index file, a folder with one of them (each also as an fsspec URL, such
            as `"s3://bucket/model"`), or the id of a model on the hub.
        device_map: Module or tensor name to device. Without a map, tensors are loaded to the devices of the
            model's tensors (the CPU for meta tensors).
        offload_folder: The folder of the index of weights for the disk, and of weights from `.bin` files.
        dtype: The dtype of floating-point weights; by default the dtype of the model's tensors. Without a
            device map, tensors of the model that are not on the meta device keep their dtype.
        offload_state_dict: Keep CPU tensors that cannot be mapped (cast weights, legacy `.bin` files) in
            temporary files rather than in memory.
        offload_buffers: Whether buffers of modules on the disk are offloaded too.
        keep_in_fp32_modules: Names of modules whose weights are float32 for any `dtype`: components of the
            full name, so that `"wo"` is `layers.0.wo`, but not `word`.
        offload_8bit_bnb: Not supported: use `accel_quant.load_and_quantize_model`, which keeps 8-bit weights
            with their statistics on any device of the map.
        strict: Raise on missing or unexpected tensors; by default they are logged.
        full_state_dict: Whether the checkpoint holds full tensors; otherwise each rank's shards.
        broadcast_from_rank0: Rank 0 reads and sends tensors to the others, which need no file.

    Raises:
        CheckpointError: The checkpoint is damaged, unsafe, or does not fit the model; the message lists all
            problems.
        SettingsError: Tensors have no device in the map, or weights for the disk have no folder.
        UnsupportedError: `offload_8bit_bnb` is True.
    """
    if offload_8bit_bnb:
        raise UnsupportedError(
            "offload_8bit_bnb=True: load_checkpoint_in_model loads weights as they are. For 8-bit weights "
            "with their statistics, load the model with load_and_quantize_model from accel_quant"
        )
    if device_map is not None:
        check_device_map(model, device_map)
        # The hooks of weights for the disk that are offloaded already would go on loading the old values.
        offloaded = [
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if isinstance(parameter, OffloadedParameter) and device_of(name, device_map) == "disk"
        ]
        if offloaded:
            raise SettingsError(
                f"{some_of(offloaded)} are offloaded, and would keep their values: the model is dispatched "
                "already. Load without a device_map, which sets the new values in memory, or call "
                "remove_hook_from_submodules(model) first"
            )
    assignment = Assignment(
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=torch_dtype(dtype),
        spill=offload_state_dict,
        offload_buffers=offload_buffers,
        dtypes={
            name: torch.float32
            for name in model_tensors(model)
            if any(f".{module}." in f".{name}." for module in keep_in_fp32_modules or ())
        },
        strict=strict,
        shards=not full_state_dict,
    )
    sources = broadcast_sources(checkpoint) if broadcast_from_rank0 else open_checkpoint(checkpoint)
    index = load_weights(model, sources, assignment)
    if index and offload_folder is None:
        raise SettingsError(
            "the device_map sends weights to the disk: pass offload_folder, where that is noted"
        )
    if index and offload_folder is not None:
        Path(offload_folder).mkdir(parents=True, exist_ok=True)
        save_offload_index(index, offload_folder)


def load_checkpoint_and_dispatch(
    model: M,
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
) -> M:
    """Load a checkpoint into a model and run the model across its devices.

    Args:
        model: The model, usually a meta model.
        checkpoint: As in `load_checkpoint_in_model`.
        device_map: Module or tensor name to device; or `"auto"`, `"balanced"`, `"balanced_low_0"` or
            `"sequential"` to infer a map. Without a map weights are loaded, and the model is not dispatched.
        max_memory: The limit of each device for an inferred map.
        no_split_module_classes: Classes whose modules an inferred map does not split.
        offload_folder: The folder of the index and weights on the disk. A safetensors checkpoint needs
            none: its weights are read in place.
        offload_buffers: As in `dispatch_model`.
        dtype: As in `load_checkpoint_in_model`.
        offload_state_dict: As in `load_checkpoint_in_model`; by default if part of the model is on the disk.
        skip_keys: As in `dispatch_model`.
        preload_module_classes: As in `dispatch_model`.
        force_hooks: As in `dispatch_model`.
        strict: Raise on missing or unexpected tensors; by default they are logged.
        full_state_dict: As in `load_checkpoint_in_model`.
        broadcast_from_rank0: Rank 0 reads and sends tensors to the others, which need no file.
        report: Measure the load, log a `LoadReport`, and set it as the model's `load_report`.

    Raises:
        CheckpointError: The checkpoint is damaged, unsafe, or does not fit the model; the message lists all
            problems.
        SettingsError: The map is invalid.
    """
    if device_map is not None and not isinstance(device_map, str):
        check_device_map(model, device_map)
    sources = broadcast_sources(checkpoint) if broadcast_from_rank0 else open_checkpoint(checkpoint)
    if isinstance(device_map, str):
        device_map = automatic_device_map(
            device_map,
            model,
            max_memory,
            no_split_module_classes,
            offload_buffers,
            dtype=dtype,
        )
    on_disk = device_map is not None and "disk" in device_map.values()
    assignment = Assignment(
        device_map=device_map,
        offload_folder=offload_folder,
        dtype=torch_dtype(dtype),
        spill=on_disk if offload_state_dict is None else offload_state_dict,
        offload_buffers=offload_buffers,
        strict=strict,
        shards=not full_state_dict,
    )
    index = load_weights(model, sources, assignment, measure=report)
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
    )


def _offload_unloaded(model: nn.Module, assignment: Assignment, index: Index) -> None:
    """Write tensors for the disk that are not in the checkpoint but have values in the model."""
    buffers = model.named_buffers() if assignment.offload_buffers else ()
    passing = get_non_persistent_buffers(model, recurse=True, fqns=True)
    unloaded = {
        name: tensor
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *buffers)
        if name not in index
        and name not in passing
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


def load_weights(
    model: nn.Module, sources: Sequence[Source], assignment: Assignment, *, measure: bool = False
) -> Index:
    """Load the files of a checkpoint by an assignment; return the index of the weights on the disk."""
    # 1. Plan the load, before anything is changed.
    start = time.perf_counter()
    tied = shared_names(model)
    if not tied and check_tied_parameters_in_config(model):
        _log.warning(
            "The model's configuration ties its embeddings, the model does not: call tie_weights() first."
        )
    plan = plan_load(model, sources, assignment, tied)
    # 2. Load file after file.
    index: Index = {}
    parts: dict[str, dict[str, Tensor]] = {}
    nbytes: Counter[str] = Counter()
    for source, steps in plan:
        assign(model, source, steps, assignment, index, parts)
        if not source.in_place:  # an open file stays the same
            source.check_unchanged()
        for step in steps:
            nbytes[step.how] += step.nbytes
    if parts:
        raise CheckpointMismatchError(
            f"the checkpoint does not match the model. Without their scales: {some_of(parts, most=20)}"
        )
    # 3. Tie weights again, except those on the disk, and report.
    devices = assignment.device_map or {}
    for group in tied:
        retie_parameters(model, [[name for name in group if device_of(name, devices) != "disk"]])
    report = LoadReport(seconds=time.perf_counter() - start, nbytes=nbytes)
    _log.info("%s", report)
    if measure:
        vars(model)["load_report"] = report
    return index
