"""What a checkpoint contains: the files of objects, shards and RNG states, and how shards are restored."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from accel_plugins import sharding
from accel_plugins.registry import find_foreign
from accel_plugins.sharding.state import (
    INDEX_NAME,
    StateForm,
    local_metadata_file,
    parameter_names,
    shard_file,
    state_by_index,
)
from accel_state.device_kinds import KINDS, DeviceKind, available_kind
from accel_state.errors import CheckpointError, SettingsError
from accel_state.frozen import frozen
from accel_state.remote import AnyPath, RemotePath
from accel_state.rng import synchronize_tensor_parallel_rng
from accel_train.checkpoint import layout
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.staging import write_object, write_weights

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from accel_plugins.sharding.folder import TensorMetadata
    from accel_plugins.strategy import Generators
    from accel_train.checkpoint.load import CheckpointReader


logger = logging.getLogger(__name__)


@frozen
class CheckpointFile:
    """A file that this rank writes.

    Args:
        name: The path inside the checkpoint.
        read: Called once; returns the state tree to write.
        write: Called as `write(state, sink)`, with the state tree or a copy of it.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any, Any], None] = write_object

    def write_to(self, sink: Any) -> None:
        """Write the current state."""
        self.write(self.read(), sink)


def shared_parts(
    weights: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Mapping[str, Any]],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    scaler: Mapping[str, Any],
    *,
    safe: bool,
) -> list[CheckpointFile]:
    """List the files that the committer writes for all ranks; weights, optimizers and scaler are states."""
    weights_name = layout.safe_weights_name if safe else layout.bin_weights_name
    rows: list[tuple[str, Callable[[], Any]]] = []
    rows += ((layout.optimizer_name(index), partial(dict, state)) for index, state in enumerate(optimizers))
    rows += ((layout.scheduler_name(index), each.state_dict) for index, each in enumerate(schedulers))
    rows += (
        (layout.loader_state_name(index), loader.torchdata_state)
        for index, loader in enumerate(dataloaders)
        if loader.use_stateful_dataloader and loader.torchdata_state()
    )
    if scaler:
        rows.append((layout.SCALER_NAME, partial(dict, scaler)))
    write = partial(write_weights, safe=safe)
    return [
        *(
            CheckpointFile(name=weights_name(index), read=partial(dict, state), write=write)
            for index, state in enumerate(weights)
        ),
        *(CheckpointFile(name=name, read=read) for name, read in rows),
    ]


def rank_files(
    dataloaders: Sequence[Any],
    generators: Generators | None = None,
    *,
    rank: int,
    device: torch.device,
    step: int | None = None,
) -> list[CheckpointFile]:
    """List the files that every rank writes: positions of its loaders, and its RNG states with the step."""

    def read_positions() -> dict[str, Any]:
        return {"loaders": [loader.state_dict() for loader in dataloaders]}

    def read_generators() -> dict[str, Any]:
        engine = None if generators is None else generators.state_dict()
        states = read_rng(device) | ({ENGINE_KEY: engine} if engine else {})
        return states if step is None else states | {"step": step}

    positions = CheckpointFile(name=layout.position_name(rank), read=read_positions)
    random_states = CheckpointFile(name=layout.rng_name(rank), read=read_generators)
    return [positions, random_states] if dataloaders else [random_states]


PYTHON_KEY = "random_state"
NUMPY_KEY = "numpy_random_seed"
TORCH_KEY = "torch_manual_seed"
ENGINE_KEY = "engine_random_state"
"""The key of the states of generators that a strategy has of its own."""
_HOST_KEYS = (PYTHON_KEY, NUMPY_KEY, TORCH_KEY)


def read_rng(device: torch.device) -> dict[str, Any]:
    """Return the states of all generators, those of devices in use included.

    Example:
        >>> sorted(read_rng(torch.device("cpu")))
        ['numpy_random_seed', 'random_state', 'torch_manual_seed']
    """
    states: dict[str, Any] = {
        PYTHON_KEY: random.getstate(),
        NUMPY_KEY: np.random.get_state(),
        TORCH_KEY: torch.get_rng_state(),
    }
    for kind in _kinds_in_use(device):
        read_all = getattr(kind.module, "get_rng_state_all", None)  # mps and xla have one device
        states[_device_key(kind)] = [kind.module.get_rng_state()] if read_all is None else read_all()
    return states


def write_rng(states: Mapping[str, Any], device: torch.device) -> list[str]:
    """Set all generators; return one sentence for each that could not be restored.

    A collective over ranks that share layers, as is `seed_per_rank`: each of them calls one of the two.
    """
    complaints = [f"{key!r} is absent" for key in _HOST_KEYS if key not in states]
    if PYTHON_KEY in states:
        version, words, gauss = states[PYTHON_KEY]
        random.setstate((version, tuple(words), gauss))
    if NUMPY_KEY in states:
        np.random.set_state(states[NUMPY_KEY])
    if TORCH_KEY in states:
        torch.set_rng_state(states[TORCH_KEY])
    present = _kinds_in_use(device)
    for kind in present:
        key = _device_key(kind)
        if key in states:
            complaints += _write_device(kind, states[key])
        else:
            complaints.append(f"{key!r} is absent: the state was saved on a machine without such a device")
    synchronize_tensor_parallel_rng()  # ranks that had other numbers may share layers now
    known = {*_HOST_KEYS, *map(_device_key, present), "step", ENGINE_KEY}
    complaints += [
        f"{key!r} is for devices that this machine lacks"
        for key in sorted(states)
        if key not in known and states[key] != []  # what Accelerate writes without a device
    ]
    return complaints


def seed_per_rank(states: Mapping[str, Any], rank: int) -> None:
    """Seed all generators of a rank that has no saved states from those of another rank."""
    torch_state = states.get(TORCH_KEY)
    source = b"" if torch_state is None else torch_state.numpy().tobytes()
    digest = hashlib.blake2b(source + str(rank).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # seeds the generators of all devices
    synchronize_tensor_parallel_rng()


def _kinds_in_use(device: torch.device) -> list[DeviceKind]:
    """Return the kinds of devices in use: that of this process, and those that are initialised."""
    kinds = (*KINDS, available_kind())  # the last may have no row
    by_type = {kind.type: kind for kind in reversed(kinds) if kind.type != "cpu" and kind.probe()}
    return [
        kind
        for kind in reversed(by_type.values())
        if kind.type == device.type or getattr(kind.module, "is_initialized", bool)()
    ]


def _device_key(kind: DeviceKind) -> str:
    return f"torch_{kind.type}_manual_seed"


def _write_device(kind: DeviceKind, states: Any) -> list[str]:
    namespace = kind.module
    if not hasattr(namespace, "get_rng_state_all"):
        namespace.set_rng_state(states[0])
        return []
    count = namespace.device_count()
    for index, state in enumerate(states[:count]):
        namespace.set_rng_state(state, index)
    if len(states) == count:
        return []
    return [f"{_device_key(kind)!r} has states of {len(states)} devices, but there are {count}"]


def form_of_run(run: CheckpointContext) -> StateForm:
    """Return the form in which models and optimizers are saved."""
    return run.strategy.states.form() if run.strategy.states.is_sharded else StateForm.FULL


def check_target(run: CheckpointContext, target: AnyPath) -> None:
    """Reject checkpoints of which each node keeps only a part, and those that an object store cannot hold."""
    topology, form = run.runtime.topology, form_of_run(run)
    is_remote = isinstance(target, RemotePath)
    if run.project.save_on_each_node:
        several_hosts = topology.world_size > topology.local_world_size
        if several_hosts and form is not StateForm.FULL:
            raise SettingsError(
                "ProjectConfiguration(save_on_each_node=True): every host would keep only a part of the "
                "model. Use state_dict_type="
                "'FULL_STATE_DICT', or a folder that all hosts share."
            )
        if is_remote:
            raise SettingsError(
                f"ProjectConfiguration(save_on_each_node=True): all hosts share {str(target)!r}. Remove "
                "this option."
            )
    if is_remote and form is StateForm.NATIVE:
        raise SettingsError(
            f"The strategy {run.strategy.name!r} reads its files from a local folder, and {str(target)!r} "
            "is on an object store: save to a folder, or with state_dict_type='SHARDED_STATE_DICT'."
        )


def folders_of(run: CheckpointContext) -> list[str]:
    """Return the folders to which all ranks write."""
    if form_of_run(run) is not StateForm.SHARDED:
        return []
    prepared = run.prepared
    return [
        *map(layout.sharded_model_name, range(len(prepared.models))),
        *map(layout.sharded_optimizer_name, range(len(prepared.optimizers))),
    ]


MODEL_KEY = "model"
OPTIMIZER_KEY = "optimizer"


def sharded_parts(run: CheckpointContext) -> list[CheckpointFile]:
    """Return this rank's shards of models and optimizers."""
    shards, prepared = run.strategy.states, run.prepared
    if not shards.is_sharded:
        return []
    states: dict[str, dict[str, Any]] = {}
    for index, model in enumerate(prepared.models):
        states[layout.sharded_model_name(index)] = {MODEL_KEY: shards.model_tensors(model)}
    for index, optimizer in enumerate(prepared.optimizers):
        state = shards.optimizer_tensors(optimizer.optimizer, prepared.models)
        states[layout.sharded_optimizer_name(index)] = {OPTIMIZER_KEY: state}
    return [part for folder, state in states.items() for part in parts_of_folder(run, folder, state)]


def parts_of_folder(run: CheckpointContext, folder: str, state: Mapping[str, Any]) -> list[CheckpointFile]:
    """Return this rank's two files of a folder of shards: the shards and their metadata."""
    writer = sharding.folder.ShardWriter(state, run.rank, run.strategy.states.planners)
    shards, metadata = f"{folder}/{shard_file(run.rank)}", f"{folder}/{local_metadata_file(run.rank)}"
    return [
        CheckpointFile(name=shards, read=writer.local_values, write=writer.write_shards),
        CheckpointFile(name=metadata, read=list, write=writer.write_local_metadata),
    ]


def native_parts(run: CheckpointContext, staging: Path) -> list[CheckpointFile]:
    """Return this rank's files in the strategy's native form, which may write small files itself."""
    parts: list[CheckpointFile] = []

    def write(state: Any, path: Path) -> None:
        parts.append(CheckpointFile(name=path.relative_to(staging).as_posix(), read=lambda: state))

    for index, model in enumerate(run.prepared.models):
        run.strategy.states.save_native(model, staging, index, write=write)
    return parts


def model_loader(
    run: CheckpointContext, source: CheckpointReader, index: int
) -> Callable[..., object] | None:
    """Return the function that loads a sharded model, with options for `load_state_dict`, or `None`."""
    name = layout.sharded_model_name(index)
    if source.has(f"{name}/{INDEX_NAME}"):
        folder = source.folder / name
        sharding.folder.read_index(folder)
        return partial(restore_model_shards, run, folder)
    is_full = any(map(source.has, layout.full_weights_names(index)))
    if form_of_run(run) is StateForm.NATIVE and not is_full:
        local = _local(source.folder)

        def load_native(model: nn.Module, **options: Any) -> None:
            if options:
                logger.warning(
                    "load_state(%s): the strategy %r ignores this for files of its own.",
                    ", ".join(f"{name}={value!r}" for name, value in options.items()),
                    run.strategy.name,
                )
            run.strategy.states.load_native(model, local, index)

        return load_native
    read = None if is_full else _foreign(source, index)
    if read is None:
        return None
    return lambda model, **options: run.strategy.states.load_full_state_dict(
        model, read().weights(), **options
    )


def _foreign(source: CheckpointReader, index: int) -> Callable[[], Any] | None:
    """Return the function that reads what another engine has written of a model, if there is anything."""
    match = find_foreign(source.folder, layout.engine_name(index), index)
    if match is None:
        return None
    folder, read = match
    files = None if source.manifest is None else source.manifest.files
    is_listed = files is None or any(name.startswith(f"{folder.name}/") for name in files)
    return partial(read, _local(folder)) if is_listed else None


def optimizer_loader(
    run: CheckpointContext, source: CheckpointReader, index: int
) -> Callable[[Optimizer], object] | None:
    """Return the function that loads a sharded optimizer, or `None` without shards."""
    name = layout.sharded_optimizer_name(index)
    if source.has(f"{name}/{INDEX_NAME}"):
        folder = source.folder / name
        sharding.folder.read_index(folder)
        return partial(restore_optimizer_shards, run, folder)
    if source.has(layout.optimizer_name(index)):
        return None
    if form_of_run(run) is StateForm.NATIVE:
        return lambda _: None  # loaded with its model
    read = _foreign(source, index)
    return None if read is None else partial(_restore_foreign_optimizer, run, read)


def _restore_foreign_optimizer(run: CheckpointContext, read: Callable[[], Any], optimizer: Optimizer) -> None:
    models, saved = run.prepared.models, read()
    state = saved.numbered_optimizer()
    if state is None:
        state = state_by_index(saved.optimizer(), parameter_names(optimizer, models))
    run.strategy.states.load_full_optimizer_state(optimizer, models, state)


def _local(folder: AnyPath) -> Path:
    if isinstance(folder, RemotePath):
        raise CheckpointError(
            f"{str(folder)!r} has files of an engine, which only reads local files. Download it."
        )
    return folder


EXTRA_STATE = "_extra_state"
"""The end of the names in state dicts of what `Module.get_extra_state` returns."""


def restore_model_shards(
    run: CheckpointContext, folder: AnyPath, model: nn.Module, *, strict: bool = True, **options: Any
) -> None:
    """Load a model from shards, for any current sharding."""
    if not run.strategy.states.is_sharded:
        state = sharding.folder.read_all(folder, _full)
        run.strategy.states.load_full_state_dict(model, _unwrap(state), strict=strict, **options)
        return
    tensors = run.strategy.states.model_tensors(model)
    wrapped: dict[str, Any] = {MODEL_KEY: tensors}
    entries = [*sharding.folder.entries(sharding.folder.read_index(folder))]
    paths = [entry.path for entry in entries]
    # The extra state of a module is allocated in the shape in which it was saved.
    extra = {str(entry.path[-1]): entry for entry in entries if str(entry.path[-1]).endswith(EXTRA_STATE)}
    tensors.update({name: _full(entry) for name, entry in extra.items() if entry.shape and name in tensors})
    if strict:
        known = {path for path in paths if path[1:2] and path[1] in tensors}  # further keys are in a value
        unknown = sorted({".".join(map(str, path[1:])) for path in paths if path not in known})
        if unknown:
            raise CheckpointError(
                f"{str(folder)!r} has {unknown[0]!r}, which {type(model).__name__} does not have. Pass "
                "strict=False to load the rest."
            )
    sharding.folder.read_into(folder, wrapped, strict=strict, planners=run.strategy.states.planners)
    run.strategy.states.load_model(model, wrapped[MODEL_KEY], strict=strict, **options)


def restore_optimizer_shards(run: CheckpointContext, folder: AnyPath, optimizer: Optimizer) -> None:
    """Load an optimizer from shards, for any current sharding."""
    models = run.prepared.models
    if not run.strategy.states.is_sharded:
        state = _unwrap(sharding.folder.read_all(folder, _full))
        state.setdefault("state", {})
        names = [group["params"] for group in state["param_groups"]]
        run.strategy.states.load_full_optimizer_state(optimizer, models, state_by_index(state, names))
        return
    make = run.strategy.states.state_allocator(optimizer, models)

    def allocate(entry: TensorMetadata) -> Tensor:
        if len(entry.path) > 3 and entry.path[1] == "state":
            key = str(entry.path[3]) if len(entry.path) == 4 else ""  # deeper ones are inside of a state
            return make(str(entry.path[2]), key, entry.shape or torch.Size(), entry.dtype or torch.float32)
        return _full(entry)

    state = _unwrap(sharding.folder.read_all(folder, allocate, run.strategy.states.planners))
    state.setdefault("state", {})
    run.strategy.states.load_optimizer(optimizer, models, state)


def _unwrap(state: dict[str, Any]) -> dict[str, Any]:
    """Return the value of a state's only key."""
    values = [*state.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], dict) else state


def _full(entry: TensorMetadata) -> Tensor:
    return torch.empty(entry.shape or (), dtype=entry.dtype, device="cpu")
