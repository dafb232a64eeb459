"""Read checkpoints of Megatron's `dist_checkpointing`: `read_megatron`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_convert.contents import CheckpointContents, OptimizerContents, lazy_of
from accel_convert.hub import config_files, load_config
from accel_convert.stream import read_lazily
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_plugins.deepspeed.folder import load_file
from accel_plugins.megatron.families import Weight, find_family, plain_name, separate_norms
from accel_plugins.sharding.folder import read_index
from accel_state.errors import CheckpointError, some_of
from accel_state.files import read_json
from accel_state.remote import AnyPath

_BACKEND_FILE, _COMMON_FILE, _LATEST_FILE = "metadata.json", "common.pt", "latest_checkpointed_iteration.txt"
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state\.(?P<key>\w+)\.(?P<name>.+)|.*)")
_MASTERS = {"param", "fp32_param"}
_STACKED = re.compile(r"(.*\.layers\.)(?!\d+\.)(.*)")


def read_megatron(folder: AnyPath, base: AnyPath | None) -> CheckpointContents | None:
    """Read a checkpoint of the backend `torch_dist`; return `None` for another format.

    A tensor that Megatron stacks over all layers is one tensor for each layer. If the optimizer has float32
    master weights, these are the weights.

    Args:
        folder: The folder of one iteration, or of all iterations, of which the latest is read.
        base: A folder with a transformers configuration, for names and layout of the result; `None` for
            Megatron's own.
    """
    if (folder / _LATEST_FILE).is_file():
        text = (folder / _LATEST_FILE).read_text().strip()
        if text != "release" and not text.isdecimal():
            raise CheckpointError(
                f"{str(folder / _LATEST_FILE)!r} has {text[:40]!r}, which is not an iteration."
            )
        folder = folder / (text if text == "release" else f"iter_{int(text):07d}")
    else:
        backend_file = folder / _BACKEND_FILE  # other libraries have files of that name
        if not backend_file.is_file() or b"sharded_backend" not in backend_file.read_bytes():
            return None
    described = read_json(folder / _BACKEND_FILE)
    backend = described.get("sharded_backend") if isinstance(described, dict) else None
    if backend != "torch_dist":
        raise CheckpointError(
            f"{str(folder)!r} was saved by Megatron's backend {backend!r}: save it again by 'torch_dist'."
        )
    # 1. Sort its contents: weights, states of the optimizer by key, and the rest.
    state, refused = read_lazily(folder, read_index(folder))
    weights: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, LazyTensor]] = {}
    contents = CheckpointContents(form="checkpoint of Megatron's dist_checkpointing")
    lost = list(refused)
    for name, value in state.items():
        match = _OPTIMIZER.fullmatch(name)
        if not isinstance(value, LazyTensor) or (match is not None and match["key"] is None):
            lost.append(name)
        elif match is None:
            weights |= _by_layer(name, value)
        else:
            states.setdefault(match["key"], {}).update(_by_layer(match["name"], value))
    if lost:
        contents.dropped.append(f"{some_of(lost)}, which are not tensors of the model or its optimizer")
    for key in _MASTERS & states.keys():
        weights |= {name: lazy for name, lazy in states.pop(key).items() if name in weights}
    # 2. Convert them to the names and layout of transformers.
    if base is not None:
        rows = _rows(base, weights)
        latest: dict[LazyTensor, Sequence[Tensor]] = {}
        weights = _unpacked(weights, rows, folder, latest)
        states = {key: _unpacked(values, rows, folder, latest) for key, values in states.items()}
        contents.config_files = config_files(base)
    contents.models.append(weights)
    # 3. Add the groups of the optimizer.
    if states:
        try:
            contents.optimizers.append(_optimizer(folder, weights, states))
        except CheckpointError as error:
            contents.dropped.append(f"optimizer 0: {error}")
    contents.dropped.append(f"{_COMMON_FILE}: arguments, schedules and random numbers")
    return contents


def _by_layer(name: str, lazy: LazyTensor) -> dict[str, LazyTensor]:
    """Split a stacked tensor into layers, under the names of Megatron's model."""
    match = _STACKED.fullmatch(name)
    if match is None or not lazy.shape:
        return {separate_norms(name): lazy}
    return {
        separate_norms(f"{match[1]}{layer}.{match[2]}"): replace(
            lazy, shape=lazy.shape[1:], read=partial(_read_layer, lazy, layer), identity=None
        )
        for layer in range(lazy.shape[0])
    }


def _read_layer(lazy: LazyTensor, layer: int, begin: int, end: int) -> Tensor:
    tensor = lazy.read(layer, layer + 1)[0]
    return (tensor if tensor.dim() else tensor.view(1))[begin:end].clone()


def _rows(base: AnyPath, weights: Mapping[str, LazyTensor]) -> dict[str, tuple[Weight, list[str]]]:
    """Return each weight's packing, and the names of its parts, from the transformers configuration."""
    config = load_config(base)
    by_parameter = {row.parameter: row for row in find_family(config).weights(config)}
    rows: dict[str, tuple[Weight, list[str]]] = {}
    for name in weights:
        plain, layer = plain_name(name)
        if (row := by_parameter.get(plain)) is not None:
            rows[name] = row, [part.format(layer=layer) for part in row.names]
    if missing := weights.keys() - rows.keys():
        raise CheckpointError(
            f"{some_of(sorted(missing))} of the checkpoint is not in a model with the configuration of "
            f"{str(base)!r}."
        )
    return rows


def _unpacked(
    weights: Mapping[str, LazyTensor],
    rows: Mapping[str, tuple[Weight, list[str]]],
    folder: AnyPath,
    latest: dict[LazyTensor, Sequence[Tensor]],
) -> dict[str, LazyTensor]:
    """Convert Megatron tensors to the tensors of a transformers checkpoint.

    `latest` has the parts of the tensor that was read last, as they are read one after another.
    """
    unpacked: dict[str, LazyTensor] = {}

    def read(lazy: LazyTensor, row: Weight, index: int, begin: int, end: int) -> Tensor:
        if lazy not in latest:
            latest.clear()
            latest[lazy] = row.packing.unpack(row.packing.join([lazy.full()]))
        tensor = latest[lazy][index]
        part = (tensor if tensor.dim() else tensor.view(1))[begin:end]
        return part.clone(memory_format=torch.contiguous_format)

    for name, lazy in weights.items():
        row, names = rows[name]
        try:
            whole = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta")
            parts = row.packing.unpack(row.packing.join([whole]))
        except RuntimeError as error:
            raise CheckpointError(
                f"{str(folder)!r} has {name!r} of shape {lazy.shape}, which does not fit the configuration "
                "in base."
            ) from error
        for index, (part, like) in enumerate(zip(names, parts, strict=True)):
            read_part = partial(read, lazy, row, index)
            unpacked[part] = LazyTensor(shape=tuple(like.shape), dtype=like.dtype, read=read_part)
    return unpacked


def _optimizer(
    folder: AnyPath, weights: Mapping[str, LazyTensor], states: Mapping[str, Mapping[str, LazyTensor]]
) -> OptimizerContents:
    """Return the optimizer with Megatron's groups: parameters with weight decay, and those without."""
    if not isinstance(folder, Path):
        raise CheckpointError(f"{_COMMON_FILE}, which has its groups, is read from local folders only")
    common: Any = load_file(folder / _COMMON_FILE).get("optimizer", {})
    counters = common.get("state", {})
    common = common.get("optimizer", common)
    groups = common.get("param_groups", [])
    by_decay = {bool(group.get("wd_mult", 1)): group for group in groups}
    others = [{key: group.get(key) for key in (*_GROUP_KEYS, *_SPLIT_KEYS)} for group in groups]
    if len(by_decay) != len(groups) or any(other != others[0] for other in others):
        raise CheckpointError("its groups are others than parameters with and without weight decay")
    step = next((group["step"] for group in groups if "step" in group), counters.get("common_step"))
    if step is None:
        raise CheckpointError("it has no count of its steps")
    for values in states.values():
        if values.keys() != weights.keys():
            raise CheckpointError(f"{some_of(sorted(weights.keys() ^ values.keys()))} has no state in it")
    # Megatron's own rule: biases and vectors do not decay.
    names: dict[bool, list[str]] = {True: [], False: []}
    for name, lazy in weights.items():
        names[not (name.endswith(".bias") or len(lazy.shape) == 1) or False not in by_decay].append(name)
    counter = lazy_of(torch.tensor(float(step), device="cpu"))
    return OptimizerContents(
        states={name: {"step": counter, **{key: states[key][name] for key in states}} for name in weights},
        groups=[
            {
                **{key: group[key] for key in _GROUP_KEYS if key in group},
                "weight_decay": group["weight_decay"] * group.get("wd_mult", 1),
                "params": names[decays],
            }
            for decays, group in by_decay.items()
        ],
    )


_FLAGS = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
_GROUP_KEYS = ("lr", "betas", "eps", *_FLAGS)
"""Options of torch's Adam; Megatron's groups may differ in others, and are then dropped."""
_SPLIT_KEYS = ("lr_mult", "is_expert_parallel", "is_decoupled_lr")
