"""Sharded checkpoints: every rank writes its shards; any strategy can load them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from accel_plugins import dcp
from accel_plugins.dcp.layout import is_sharded_folder, local_metadata_file, shard_file
from accel_plugins.dcp.protocol import StateForm
from accel_plugins.dcp.tensors import numbered_state, parameter_names
from accel_plugins.deepspeed.folder import engine_folder, is_engine_folder, read_folder
from accel_state.errors import CheckpointError, SettingsError
from accel_train.checkpoint import layout
from accel_train.checkpoint.writer import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from accel_plugins.dcp import Entry
    from accel_plugins.roles import NativeFiles
    from accel_train.checkpoint.apply import Source
    from accel_train.checkpoint.run import Run

MODEL_KEY = "model"
OPTIMIZER_KEY = "optimizer"
EXTRA_STATE = "_extra_state"
"""The end of the names of what `Module.get_extra_state` gives, in state dicts."""


def form_of(run: Run) -> StateForm:
    """Return the form in which models and optimizers are saved."""
    return StateForm.FULL if run.strategy.shards is None else run.strategy.shards.form()


def folders_of(run: Run) -> list[str]:
    """Return the folders to which all ranks write."""
    if form_of(run) is not StateForm.SHARDED:
        return []
    prepared = run.prepared
    return [
        *map(layout.sharded_model_name, range(len(prepared.models))),
        *map(layout.sharded_optimizer_name, range(len(prepared.optimizers))),
    ]


def sharded_parts(run: Run) -> list[Part]:
    """Return this rank's shards of models and optimizers."""
    shards, prepared = run.strategy.shards, run.prepared
    if shards is None:
        return []
    states: dict[str, dict[str, Any]] = {}
    for index, model in enumerate(prepared.models):
        states[layout.sharded_model_name(index)] = {MODEL_KEY: shards.model_tensors(model)}
    for index, optimizer in enumerate(prepared.optimizers):
        state = shards.optimizer_tensors(optimizer.optimizer, prepared.models)
        states[layout.sharded_optimizer_name(index)] = {OPTIMIZER_KEY: state}
    return [part for folder, state in states.items() for part in parts_of_folder(run, folder, state)]


def parts_of_folder(run: Run, folder: str, state: Mapping[str, Any]) -> list[Part]:
    """Return the two files of this rank."""
    rank = run.rank
    writer = dcp.ShardWriter(state, rank, run.strategy.planners)
    return [
        Part(name=f"{folder}/{shard_file(rank)}", read=writer.local_values, write=writer.write_shards),
        Part(name=f"{folder}/{local_metadata_file(rank)}", read=list, write=writer.write_local_metadata),
    ]


def check_shared(run: Run) -> None:
    """Refuse a sharded checkpoint whose nodes write to folders of their own."""
    topology = run.runtime.topology
    several_hosts = topology.world_size > topology.local_world_size
    if run.project.save_on_each_node and several_hosts and form_of(run) is not StateForm.FULL:
        raise SettingsError(
            "ProjectConfiguration(save_on_each_node=True): every host would keep a part of the model only; "
            "use state_dict_type='FULL_STATE_DICT', or a folder that all hosts share."
        )


def native_parts(run: Run, staging: Path) -> list[Part]:
    """Return this rank's files in the strategy's native form, which may write small files at once."""
    prepared, native = run.prepared, _native(run)
    parts: list[Part] = []

    def write(state: Any, path: Path) -> None:
        parts.append(Part(name=path.relative_to(staging).as_posix(), read=lambda: state))

    for index, model in enumerate(prepared.models):
        native.save_model(model, staging, index, write=write)
    for index, optimizer in enumerate(prepared.optimizers):
        owner = owner_of(optimizer, prepared.models)
        native.save_optimizer(optimizer.optimizer, owner, staging, index, write=write)
    return parts


def owner_of(optimizer: Optimizer, models: Sequence[nn.Module]) -> nn.Module:
    """Return the model that has the first parameter of an optimizer; the first model if none has."""
    first = {id(one) for group in optimizer.param_groups[:1] for one in group["params"][:1]}
    return next((model for model in models if any(id(one) in first for one in model.parameters())), models[0])


def model_loader(run: Run, source: Source, index: int) -> Callable[..., object] | None:
    """Return what loads a sharded model, with options of `load_state_dict`; `None` without shards."""
    folder = source.folder / layout.sharded_model_name(index)
    if is_sharded_folder(folder):
        dcp.read_index(folder)
        return partial(restore_model_shards, run, folder)
    if form_of(run) is StateForm.NATIVE and not _is_full(source, index):
        return lambda model, **_: _native(run).load_model(model, source.folder, index)
    engine = engine_folder(source.folder, layout.engine_name(index), index)
    if is_engine_folder(engine):
        return lambda model, **options: run.strategy.persister.load_full_state_dict(
            model, read_folder(engine).weights(), **options
        )
    return None


def optimizer_loader(run: Run, source: Source, index: int) -> Callable[[Optimizer], object] | None:
    """Return what loads a sharded optimizer; `None` without shards."""
    folder = source.folder / layout.sharded_optimizer_name(index)
    models = run.prepared.models
    if is_sharded_folder(folder):
        dcp.read_index(folder)
        return partial(restore_optimizer_shards, run, folder)
    if form_of(run) is StateForm.NATIVE and not source.has(layout.optimizer_name(index)):
        return lambda one: _native(run).load_optimizer(one, owner_of(one, models), source.folder, index)
    engine = engine_folder(source.folder, layout.engine_name(index), index)
    if is_engine_folder(engine):
        return partial(_restore_engine_optimizer, run, engine)
    return None


def _restore_engine_optimizer(run: Run, engine: Path, optimizer: Optimizer) -> None:
    models, saved = run.prepared.models, read_folder(engine)
    state = saved.numbered_optimizer()
    if state is None:
        state = numbered_state(saved.optimizer(), parameter_names(optimizer, models))
    run.strategy.persister.load_full_optimizer_state(optimizer, models, state)


def _native(run: Run) -> NativeFiles:
    if run.strategy.native is None:
        raise CheckpointError("The strategy writes its own files, and has no `native` that does.")
    return run.strategy.native


def _is_full(source: Source, index: int) -> bool:
    names = (
        *(layout.weights_name(index, safe=safe) for safe in (True, False)),
        layout.fsdp_weights_name(index),
    )
    return any(source.has(name) for name in names)


def restore_model_shards(
    run: Run, folder: Path, model: nn.Module, *, strict: bool = True, **options: Any
) -> None:
    """Load a model from shards, however it is sharded now."""
    if run.strategy.shards is None:
        state = dcp.read_all(folder, _full)
        run.strategy.persister.load_full_state_dict(model, _inside(state), strict=strict, **options)
        return
    tensors = run.strategy.shards.model_tensors(model)
    wrapped: dict[str, Any] = {MODEL_KEY: tensors}
    entries = [*dcp.entries(dcp.read_index(folder))]
    paths = [entry.path for entry in entries]
    # The extra state of a module has the shape that it had when it was saved.
    extra = {str(entry.path[-1]): entry for entry in entries if str(entry.path[-1]).endswith(EXTRA_STATE)}
    tensors.update({name: _full(entry) for name, entry in extra.items() if entry.shape and name in tensors})
    if strict:
        unknown = sorted({".".join(map(str, path[1:])) for path in paths} - tensors.keys())
        if unknown:
            raise CheckpointError(
                f"{str(folder)!r} has {unknown[0]!r}, which {type(model).__name__} does not have; pass "
                "strict=False to load the rest."
            )
    dcp.read_into(folder, wrapped, strict=strict, planners=run.strategy.planners)
    run.strategy.shards.load_model(model, wrapped[MODEL_KEY], strict=strict, **options)


def restore_optimizer_shards(run: Run, folder: Path, optimizer: Optimizer) -> None:
    """Load an optimizer from shards, however it is sharded now."""
    models = run.prepared.models
    if run.strategy.shards is None:
        state = _inside(dcp.read_all(folder, _full))
        state.setdefault("state", {})
        names = [group["params"] for group in state["param_groups"]]
        run.strategy.persister.load_full_optimizer_state(optimizer, models, numbered_state(state, names))
        return
    make = run.strategy.shards.state_allocator(optimizer, models)

    def allocate(entry: Entry) -> Tensor:
        if len(entry.path) > 3 and entry.path[1] == "state":
            return make(str(entry.path[2]), entry.shape or torch.Size(), entry.dtype or torch.float32)
        return _full(entry)

    state = _inside(dcp.read_all(folder, allocate, run.strategy.planners))
    state.setdefault("state", {})
    run.strategy.shards.load_optimizer(optimizer, models, state)


def _inside(state: dict[str, Any]) -> dict[str, Any]:
    """What is under the one key that there is."""
    values = [*state.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], dict) else state


def _full(entry: Entry) -> Tensor:
    return torch.empty(entry.shape or (), dtype=entry.dtype)
