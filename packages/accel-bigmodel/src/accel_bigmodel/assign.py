"""Plan the target of each tensor of a checkpoint before any is changed; then load them."""

from __future__ import annotations

import logging
import math
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from accel_bigmodel.offload import load_offloaded_weight, offload_weight
from accel_bigmodel.placement import Site, set_module_tensor_to_device, sites_of
from accel_ops.weights.read import device_of
from accel_ops.weights.sizes import convert_bytes
from accel_state.errors import CheckpointMismatchError, SettingsError, some_of

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from accel_bigmodel.offload_index import Index
    from accel_bigmodel.sources import Source

    Device = int | str | torch.device

_log = logging.getLogger(__name__)
_HOST_TYPES = ("cpu", "meta")
UPLOAD_BATCH = 512 << 20
"""Bytes that are uploaded at a time, in the types of the file."""

How = Literal["map", "cast", "read", "pinned", "copy", "in place", "broadcast"]
"""How a tensor comes: mapped; read and cast; read; through pinned buffers; copied; left; from rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The arguments of a load; see `load_checkpoint_in_model`."""

    device_map: Mapping[str, Device] | None = None
    offload_folder: str | os.PathLike[str] | None = None
    dtype: torch.dtype | None = None
    spill: bool = False
    offload_buffers: bool = False
    keep_in_fp32: tuple[str, ...] = ()
    strict: bool = False
    shards: bool = False
    memory_limit: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The load plan of one tensor, which gets the type `dtype`."""

    name: str
    device: Device | None
    dtype: torch.dtype
    nbytes: int
    how: How
    site: Site


Plan = list[tuple["Source", list[Step]]]


def plan_load(
    model: nn.Module,
    sources: Sequence[Source],
    assignment: Assignment,
    tied: Sequence[Sequence[str]],
) -> Plan:
    """Match a checkpoint with a model.

    Raises:
        CheckpointMismatchError: Shapes differ; or, with `strict`, names are missing or unexpected.
        SettingsError: The load would take more memory than the limit.
    """
    wanted = {name: site for name, site in sites_of(model).items() if site.persistent}
    seen: set[str] = set()
    plan: Plan = []
    misshaped: list[str] = []
    unexpected: list[str] = []
    for source in sources:
        steps: list[Step] = []
        for name, (shape, dtype) in source.tensors.items():
            site = wanted.get(name)
            if site is None:
                unexpected.append(name)
                continue
            target = site.table[site.leaf]
            if name in seen:
                continue
            seen.add(name)
            plain = type(target) in (torch.nn.Parameter, torch.Tensor) or hasattr(target, "device_mesh")
            if plain and tuple(target.shape) != shape and not assignment.shards:
                misshaped.append(
                    f"{name} ({list(shape)} in the checkpoint, {list(target.shape)} in the model)"
                )
                continue
            steps.append(_step(name, shape, dtype, site, source, assignment))
        plan.append((source, steps))
    served = {name for group in tied if seen.intersection(group) for name in group}
    missing = [name for name in wanted if name not in seen and name not in served]
    _warn_mismatches(misshaped, missing, unexpected, assignment)
    _check_limit(plan, assignment)
    return plan


def assign(
    model: nn.Module,
    source: Source,
    steps: Sequence[Step],
    assignment: Assignment,
    index: Index,
    sample: Callable[[], None],
) -> dict[str, int]:
    """Load one file's tensors to their devices; return the bytes by how they came."""
    strategies: dict[str, int] = {}
    spilled = None
    uploaded: dict[str, Tensor] = {}
    batches = _upload_batches(source, steps)
    for step in steps:
        if step.name in batches:
            names, device = batches[step.name]
            uploaded.update(source.upload(names, device))
        strategies[step.how] = strategies.get(step.how, 0) + step.nbytes
        if step.device == "disk":
            _to_disk(source, step, assignment, index)
            continue
        value = uploaded.pop(step.name) if step.name in uploaded else source.get(step.name)
        if step.how in ("cast", "read") and assignment.spill and str(step.device) == "cpu":
            spilled = spilled or tempfile.TemporaryDirectory(prefix="accel-spill-")
            value = _spilled(value.to(step.dtype), step.name, spilled.name)
        _put(model, step, value, assignment)
        if step.how != "map":
            sample()
    if spilled is not None:
        spilled.cleanup()  # what is mapped stays readable
    return strategies


def _step(
    name: str,
    shape: tuple[int, ...],
    stored: torch.dtype,
    site: Site,
    source: Source,
    assignment: Assignment,
) -> Step:
    device: Device | None = None
    target: Tensor = site.table[site.leaf]
    if assignment.device_map is not None:
        device = device_of(name, assignment.device_map)
        if device == "disk" and site.is_buffer and not assignment.offload_buffers:
            device = "cpu"
    elif target.is_meta:
        device = "cpu"
    dtype = stored
    if stored.is_floating_point:
        dtype = assignment.dtype or target.dtype
        if any(part in name.split(".") or part in name for part in assignment.keep_in_fp32):
            dtype = torch.float32
    elif type(target) in (torch.nn.Parameter, torch.Tensor):
        dtype = target.dtype
    return Step(
        name=name,
        device=device,
        dtype=dtype,
        nbytes=math.prod(shape) * dtype.itemsize,
        how=_how(source, device, cast=dtype != stored),
        site=site,
    )


def _how(source: Source, device: Device | None, *, cast: bool) -> How:
    if source.broadcast:
        return "broadcast"
    if device == "disk":
        return "in place" if source.in_place else "read"
    if device is not None and torch.device(device).type not in _HOST_TYPES:
        return "pinned" if source.in_place else "copy"
    if device is None or not source.mapped:
        return "read"
    return "cast" if cast else "map"


def _upload_batches(source: Source, steps: Sequence[Step]) -> dict[str, tuple[list[str], torch.device]]:
    """Group tensors into upload batches: the first tensor of a batch to all its tensors, and their device.

    A batch is bounded in the types of the file: it is on the device beside what it is cast to.
    """
    batches: dict[str, tuple[list[str], torch.device]] = {}
    current: list[str] = []
    size, device = 0, None
    for step in steps:
        if step.how != "pinned" or step.device is None:
            continue
        shape, stored = source.tensors[step.name]
        nbytes = math.prod(shape) * stored.itemsize
        if not current or step.device != device or size + nbytes > UPLOAD_BATCH:
            current, size, device = [], 0, step.device
            batches[step.name] = current, torch.device(step.device)
        current.append(step.name)
        size += nbytes
    return batches


def _put(model: nn.Module, step: Step, value: Tensor, assignment: Assignment) -> None:
    table, leaf = step.site.table, step.site.leaf
    target = table[leaf]
    if step.how == "map" and type(target) is torch.nn.Parameter and not vars(target):
        # What set_module_tensor_to_device would come to, a hundred times faster.
        table[leaf] = torch.nn.Parameter(value, target.requires_grad and value.is_floating_point())
    elif hasattr(target, "device_mesh"):
        part = _sharded(value.to(step.dtype), target, assignment)
        if target.is_meta:
            table[leaf] = torch.nn.Parameter(part, requires_grad=target.requires_grad)
        else:
            target.detach().copy_(part)  # whoever shards the model keeps its own parameters
    elif step.device is None:
        with torch.no_grad():
            target.copy_(value)
    else:
        set_module_tensor_to_device(
            model, step.name, step.device, value=value, dtype=step.dtype, clear_cache=False
        )


def _sharded(value: Tensor, like: Any, assignment: Assignment) -> Tensor:
    """Make this rank's shard of a `DTensor`, from the full tensor or from the shard itself."""
    tensors = import_module("torch.distributed.tensor")  # slow; only distributed parameters need it
    device = like.device_mesh.device_type
    if assignment.shards:
        return tensors.DTensor.from_local(value.to(device), like.device_mesh, like.placements)
    # Every rank has the full tensor: no communication.
    return tensors.distribute_tensor(value.to(device), like.device_mesh, like.placements, src_data_rank=None)


def _to_disk(source: Source, step: Step, assignment: Assignment, index: Index) -> None:
    if source.in_place:
        index[step.name] = {
            "safetensors_file": str(source.path.absolute()),
            "weight_name": step.name,
            "dtype": str(step.dtype).removeprefix("torch."),
        }
        return
    if assignment.offload_folder is None:
        raise SettingsError(
            f"{step.name!r} goes to the disk and comes from {source.path.name!r}, which cannot be read in "
            "place: pass offload_folder, or save the checkpoint as safetensors"
        )
    Path(assignment.offload_folder).mkdir(parents=True, exist_ok=True)
    offload_weight(source.get(step.name).to(step.dtype), step.name, assignment.offload_folder, index)


def _spilled(value: Tensor, name: str, folder: str) -> Tensor:
    entry = offload_weight(value, name, folder)[name]
    return load_offloaded_weight(Path(folder) / f"{name}.dat", entry)


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
    if misshaped or (lines and assignment.strict):
        raise CheckpointMismatchError(f"the checkpoint does not fit the model. {'; '.join(lines)}")
    if unexpected:
        shown = some_of(unexpected, most=20)
        _log.warning("Some weights of the checkpoint were not used when loading the model: %s.", shown)
    if missing:
        _log.warning(
            "Some weights of the model are missing from the checkpoint: %s.", some_of(missing, most=20)
        )


def _check_limit(plan: Plan, assignment: Assignment) -> None:
    limit = assignment.memory_limit
    if limit is None:
        return
    held = [step for _, steps in plan for step in steps if step.how in ("cast", "read", "broadcast")]
    taking = [step for step in held if step.device not in (None, "disk") and not assignment.spill]
    total = sum(step.nbytes for step in taking)
    if total > limit:
        raise SettingsError(
            f"the load would put {convert_bytes(total)} into memory, more than the limit of "
            f"{convert_bytes(limit)}: {some_of(step.name for step in taking)} cannot be mapped. Load them in "
            "the checkpoint's own type, send them to the disk, or pass offload_state_dict=True"
        )
