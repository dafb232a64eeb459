"""Read checkpoints of DeepSpeed's engine: `read_engine_state`, `read_universal`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from accel_convert.contents import CheckpointContents, OptimizerContents, name_parameters
from accel_ops.tree import recursively_apply
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_plugins.deepspeed.folder import engine_folder, is_engine_folder, load_file, range_of, read_folder
from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath
from accel_train.checkpoint import layout


def read_engine_state(folder: AnyPath) -> CheckpointContents | None:
    """Read a state of ZeRO stages 0 to 3, the folder of `engine.save_checkpoint`, or one below it.

    Files are memory-mapped, and no code in them is executed.
    """
    numbered = (engine_folder(folder, layout.engine_name(index), index) for index in count())
    engines = [folder] if is_engine_folder(folder) else [*takewhile(is_engine_folder, numbered)]
    if not engines:
        return None
    contents = CheckpointContents(form="checkpoint of DeepSpeed")
    for index, engine in enumerate(engines):
        saved = read_folder(_local(engine))
        weights = contents.weights_in(_lazily(saved.weights(_from_parts)), engine.name)
        contents.models.append(weights)
        try:
            state = saved.numbered_optimizer() or saved.optimizer(_from_parts)
            contents.optimizers.append(name_parameters(_lazily(state), weights))
        except CheckpointError as error:
            contents.dropped.append(f"optimizer {index}: {error}")
    if engines != [folder]:
        read = {engine.name for engine in engines} | layout.ENGINE_ROOT_FILES
        contents.add_state(folder, read.__contains__)
    return contents


def _local(folder: AnyPath) -> Path:
    if isinstance(folder, Path):
        return folder
    raise CheckpointError(
        f"{str(folder)!r} has files of an engine, which only reads local files. Download it."
    )


MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Names of the model file in a universal checkpoint, at stages 1 and 2, and at stage 3."""
UNIVERSAL_TAG_FILE = "latest_universal"
"""The file that names the sibling folder that an engine loads."""


def read_universal(folder: AnyPath) -> CheckpointContents | None:
    """Read an output of DeepSpeed's `ds_to_universal`: files for each parameter, and one of the model."""
    if (folder / UNIVERSAL_TAG_FILE).is_file():
        tag = (folder / UNIVERSAL_TAG_FILE).read_text().strip()
        if PurePath(tag).name != tag:
            raise CheckpointError(
                f"{str(folder / UNIVERSAL_TAG_FILE)!r} has {tag[:40]!r}, which is no folder."
            )
        folder = folder / tag
    model = next((folder / name for name in MODEL_FILES if (folder / name).is_file()), None)
    if model is None or not (folder / "zero").is_dir():
        return None
    folder = _local(folder)
    saved = load_file(folder / model.name)
    contents = CheckpointContents(form="universal checkpoint of DeepSpeed")
    weights = contents.weights_in(_lazily(dict(saved["module"])), folder.name)
    contents.models.append(weights)
    shapes = {name: shape for group in saved["param_shapes"] for name, shape in group.items()}
    states: dict[str | int, dict[str, Any]] = {}
    for parameter in sorted((folder / "zero").iterdir()):
        if not parameter.is_dir():
            continue
        values: dict[str, Any] = {path.stem: load_file(path) for path in sorted(parameter.glob("*.pt"))}
        for key, value in values.items():
            flat = value["param"] if isinstance(value, dict) else value
            shape = shapes.get(parameter.name, flat.shape) if flat.dim() else flat.shape
            values[key] = _from_parts(range_of([flat.flatten()], 0, math.prod(shape)), torch.Size(shape))
        weights[parameter.name] = values.pop("fp32")
        if values:  # buffers have none
            states[parameter.name] = values
    common = folder / "zero" / "optimizer_state.pt"
    names = [[*group] for group in saved["param_shapes"]]
    if common.is_file() and shapes.keys() == states.keys():
        shared = load_file(common)
        of_ranks = shared.get("optimizer_state_dict", {}).get("state", {})  # at stage 3
        counters = {
            key: value
            for key, value in next(iter(of_ranks.values()), {}).items()
            if not isinstance(value, Tensor) or not value.dim()
        }
        for values in states.values():
            values |= {key: _lazily(value) for key, value in counters.items() if key not in values}
        of_group = zip(shared["param_groups"], names, strict=True)
        groups = [{**_lazily(group), "params": of_names} for group, of_names in of_group]
        contents.optimizers.append(OptimizerContents(states=states, groups=groups))
    else:
        reason = "zero/optimizer_state.pt, which has its groups, does not exist"
        contents.dropped.append(f"optimizer 0: {reason}")
    return contents


def _lazily(tree: Any) -> Any:
    """Replace the mapped tensors of nested containers with lazy ones."""
    known: dict[int, LazyTensor] = {}

    def lazy(tensor: Tensor) -> LazyTensor:
        if id(tensor) not in known:
            flat = tensor.detach().contiguous().flatten()
            known[id(tensor)] = _from_parts([flat], tensor.shape)
        return known[id(tensor)]

    return recursively_apply(lazy, tree, test_type=lambda leaf: isinstance(leaf, Tensor))


def _from_parts(parts: Sequence[Tensor], shape: torch.Size) -> LazyTensor:
    size = math.prod(shape[1:])

    def read(first: int, last: int) -> Tensor:
        return torch.cat(range_of(parts, first * size, (last - first) * size)).view(last - first, *shape[1:])

    return LazyTensor(shape=tuple(shape), dtype=parts[0].dtype, read=read, identity=object())
