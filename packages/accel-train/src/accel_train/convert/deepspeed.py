"""Read checkpoints of DeepSpeed's engine: `is_engine_state`, `read_engine_state`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accel_ops.tree import recursively_apply
from accel_ops.weights.lazy_tensors import LazyTensor
from accel_plugins.deepspeed.folder import engine_folder, is_engine_folder, range_of, read_folder
from accel_state.errors import CheckpointError
from accel_state.remote import AnyPath
from accel_train.checkpoint import layout
from accel_train.convert.contents import CheckpointContents, OptimizerContents
from accel_train.convert.names import name_parameters


def is_engine_state(folder: AnyPath) -> bool:
    """Return whether it is a state of ZeRO, the folder of `engine.save_checkpoint`, or one below it."""
    return is_engine_folder(folder) or is_engine_folder(engine_folder(folder, layout.engine_name(0), 0))


def read_engine_state(
    folder: AnyPath, of_state: Callable[..., CheckpointContents], weights_in: Callable[..., Any]
) -> CheckpointContents:
    """Read a checkpoint of ZeRO stages 0 to 3; its files are mapped, and nothing of them is executed.

    Raises:
        CheckpointError: A file is damaged or absent, or it is on a store.
    """
    if not isinstance(folder, Path):
        raise CheckpointError(f"{str(folder)!r} has files of an engine, which reads local ones: download it.")
    models: list[dict[str, LazyTensor]] = []
    optimizers: list[OptimizerContents] = []
    dropped: list[str] = []
    engines = _engines(folder)
    for index, engine in enumerate(engines):
        saved = read_folder(engine)
        weights = weights_in(_lazily(saved.weights(_from_parts)), engine.name, dropped)
        models.append(weights)
        try:
            numbered = saved.numbered_optimizer()
            if numbered is None:
                state = _lazily(saved.optimizer(_from_parts))
                optimizers.append(OptimizerContents(states=state["state"], groups=state["param_groups"]))
            else:
                state = _lazily(numbered)
                optimizers.append(
                    name_parameters(state["state"], state["param_groups"], weights, in_order=True)
                )
        except CheckpointError as error:
            dropped.append(f"optimizer {index}: {error}")
    form = "checkpoint of DeepSpeed"
    if engines == [folder]:
        return CheckpointContents(form=form, models=models, optimizers=optimizers, dropped=dropped)
    read = {engine.name for engine in engines} | layout.ENGINE_ROOT_FILES
    return of_state(folder, form, models, optimizers, dropped, read.__contains__)


def _engines(folder: Path) -> list[Path]:
    if is_engine_folder(folder):
        return [folder]
    engines: list[Path] = []
    while is_engine_folder(engine := engine_folder(folder, layout.engine_name(len(engines)), len(engines))):
        engines.append(Path(str(engine)))
    return engines


def _lazily(tree: Any) -> Any:
    """Replace the mapped tensors of nested containers by lazy ones."""
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
