"""Load a checkpoint: verify its files, read them on every rank, restore the objects of the run.

Nothing changes in the run before all ranks have verified and read the same checkpoint.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel
from accel_ops.tree import walk
from accel_ops.weights.layout import MODEL_NAME, SAFETENSORS_SUFFIX
from accel_ops.weights.mapped import releasable
from accel_ops.weights.read import is_mappable
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_ops.weights.tensors import get_non_persistent_buffers, tensor_memory
from accel_plugins import sharding
from accel_plugins.registry import find_foreign
from accel_plugins.sharding.state import (
    INDEX_NAME,
    StateForm,
    parameter_names,
    state_by_index,
    strip_wrapper_prefixes,
)
from accel_plugins.strategy import Generators
from accel_state.errors import CheckpointError, DistributedOperationException, SettingsError
from accel_state.files import any_path
from accel_state.frozen import frozen
from accel_state.remote import AnyPath, RemotePath
from accel_state.rng import synchronize_tensor_parallel_rng
from accel_state.torch_private import is_traceable_wrapper_subclass
from accel_train.checkpoint import folder as folders
from accel_train.checkpoint import layout, stores
from accel_train.checkpoint.agreement import first_problem, raising_everywhere
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.layout import MODEL_KEY, Manifest
from accel_train.checkpoint.save import ENGINE_KEY, TORCH_KEY, process_generators
from accel_train.checkpoint.staging import location_of, read_object

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.optim import Optimizer

    from accel_plugins.sharding.folder import TensorMetadata

logger = logging.getLogger(__name__)
WHAT = "load_state()"
_MAPPED_FROM = 1 << 20  # bytes of a file of `torch.save`


def load(
    run: CheckpointContext,
    input_dir: str | os.PathLike[str] | None,
    *,
    options: Mapping[str, Any],
    model_options: Mapping[str, Any],
    verify: bool,
) -> AnyPath:
    """Load the state of a run, as `Accelerator.load_state`; return the folder of the checkpoint."""
    run.finish()
    if input_dir is None and not run.is_automatic:
        raise SettingsError(
            "load_state() needs an input_dir, unless the Accelerator has a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    to_model = dict(model_options)
    location = location_of(to_model.pop("map_location", None), run.runtime.device)
    # 1. Find the newest complete checkpoint, and read it.
    requested = None if input_dir is None else any_path(input_dir, "load_state(input_dir)")
    candidates = _find(run, requested, WHAT)
    if not candidates:
        raise CheckpointError(
            f"There is no complete checkpoint in {str(run.numbered)!r}. Check "
            "accelerator.has_checkpoint before load_state()."
        )
    folder, manifest = _newest_complete(run, candidates, verifies=verify)
    source = CheckpointReader(
        folder=folder,
        manifest=manifest,
        rank=run.rank,
        world_size=run.runtime.topology.world_size,
        device=run.runtime.device,
        map_location=location,
        options=options,
    )
    with raising_everywhere(run.main, WHAT), _of_one_state(source):
        models, restores = _read(run, source)
    # 2. Restore the objects of this rank.
    with raising_everywhere(run.main, WHAT), _of_one_state(source), releasable(source.mapped):
        _restore_models(run, source, models, to_model)
        while restores:  # each is dropped with the state that it holds
            restores.pop(0)()
    logger.info("Loaded the state from %s.", folder)
    return folder


def has_checkpoint(run: CheckpointContext) -> bool:
    """Return whether there is a complete numbered checkpoint; call it on every rank."""
    run.finish()
    return run.is_automatic and bool(_find(run, None, "has_checkpoint"))


def _find(run: CheckpointContext, requested: AnyPath | None, operation: str) -> list[AnyPath]:
    """Return the requested folder, or the numbered checkpoints that are complete on all nodes, newest first.

    Where something is loaded, this sets the number of the next checkpoint.
    """
    complete: list[int] | None = None
    following, problem = 0, ""
    try:
        if run.commits and run.is_automatic:
            complete = folders.list_complete(run.numbered) if requested is None else None
            following = max(folders.numbers(run.numbered), default=-1) + 1
        if run.commits and requested is not None:
            if requested.is_dir():
                folders.recover(requested)
            else:
                problem = f"there is no folder {str(requested)!r}"
    except (OSError, CheckpointError) as error:
        problem = f"{error}"
    asked = None if requested is None else str(requested)
    rows = run.main.exchange(operation, (asked, complete, following, problem))
    requests, found, numbers, problems = zip(*rows, strict=True)
    is_shared = not run.project.save_on_each_node
    if any(request != asked for request in requests if is_shared or None in {request, asked}):
        raise DistributedOperationException(
            "load_state() was called for different folders: "
            + "; ".join(f"rank {rank}: {request!r}" for rank, request in enumerate(requests))
        )
    if problem := first_problem(problems):
        raise CheckpointError(problem)
    if run.is_automatic and operation == WHAT:
        run.project.iteration = max(numbers)
    if requested is not None:
        return [requested]
    everywhere = set[int].intersection(*({*numbers} for numbers in found if numbers is not None))
    return [run.numbered / layout.numbered_name(number) for number in sorted(everywhere, reverse=True)]


def _newest_complete(
    run: CheckpointContext, candidates: Sequence[AnyPath], *, verifies: bool
) -> tuple[AnyPath, Manifest | None]:
    """Return the first checkpoint that is complete, the same on every rank, with its manifest.

    The ranks, which share the files, compare sizes, and if `verifies` checksums.
    """
    problems: list[str] = []
    topology, on_each_node = run.runtime.topology, run.project.save_on_each_node
    num_readers = topology.local_world_size if on_each_node else topology.world_size
    for folder in candidates:
        # 1. Check the folder, and this rank's share of the files: about as many bytes as others have.
        manifest, problem = None, ""
        try:
            manifest = share = layout.read_manifest(folder)
            if manifest is not None:
                rows = sorted(manifest.files.items(), key=lambda row: (-row[1].size, row[0]))
                share = replace(manifest, files=dict(rows[run.rank - run.committer :: num_readers]))
            folders.check(folder, share)
            if verifies and share is not None:
                folders.verify(folder, share)
        except (OSError, CheckpointError) as error:
            problem = str(error) if folders.is_unchanged(folder, manifest) else _replaced(folder)
        # 2. Agree on one undamaged checkpoint.
        digest = "" if manifest is None else xxhash.xxh3_64(manifest.to_text().encode()).hexdigest()
        digests, found = zip(*run.main.exchange(WHAT, (digest, problem)), strict=True)
        differ = not on_each_node and len({*digests} - {""}) > 1
        problem = _replaced(folder) if differ else first_problem(found)
        if not problem:
            return folder, manifest
        problems.append(problem)
        if len(candidates) > 1:
            logger.warning("Skipped: %s", problem)
    raise CheckpointError(problems[0] if len(problems) == 1 else f"No checkpoint is complete. {problems[0]}")


def _replaced(folder: AnyPath) -> str:
    return f"{str(folder)!r} was replaced by another process while it was loaded. Call load_state() again."


@contextmanager
def _of_one_state(source: CheckpointReader) -> Generator[None]:
    """Raise an error if another process replaces the checkpoint within the block, instead of what follows."""
    try:
        yield
    except (OSError, CheckpointError):
        if folders.is_unchanged(source.folder, source.manifest):
            raise
    if not folders.is_unchanged(source.folder, source.manifest):
        raise CheckpointError(_replaced(source.folder))


@frozen
class Shards:
    """A folder of shards, and its index, which is read once: it grows with the number of ranks that saved."""

    folder: AnyPath
    index: Metadata

    @classmethod
    def of(cls, folder: AnyPath) -> Shards:
        """Read the index of a folder."""
        return cls(folder=folder, index=sharding.folder.read_index(folder))


@frozen
class CheckpointReader:
    """A checkpoint that one rank reads.

    Args:
        manifest: `None` for a checkpoint that another library wrote.
        map_location: The device to which optimizer states are read first.
        options: More arguments of `torch.load`.
        mapped: The tensors of mapped files.
    """

    folder: AnyPath
    manifest: Manifest | None
    rank: int
    world_size: int
    device: torch.device
    map_location: torch.device = torch.device("cpu")
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mapped: list[Tensor] = field(default_factory=list[Tensor])

    def read(self, name: str) -> Any:
        """Read one file. Safetensors, and other large files of tensors, are mapped.

        Raises:
            CheckpointError: The file is absent or damaged, or holds objects that are unsafe to load.
        """
        if not self.has(name):
            raise CheckpointError(
                f"The checkpoint {str(self.folder)!r} has no {name!r}. Prepare and register the same "
                "objects, in the same order, as in the run that was saved."
            )
        is_optimizer = name.startswith(layout.OPTIMIZER_NAME)
        location = self.map_location if is_optimizer else torch.device("cpu")
        # A large file of `torch.save` is mapped, so that its tensors are copied one by one.
        maps = location.type == "cpu" and not self.options and (is_optimizer or name.startswith(MODEL_NAME))
        with stores.on_disk(self.folder / name) as path:
            if name.endswith(SAFETENSORS_SUFFIX):
                file = SafetensorsFile(path)
                state: Any = {key: file.tensor(key) for key in file.entries}
            elif maps and path.stat().st_size >= _MAPPED_FROM and is_mappable(path):
                state = read_object(path, mmap=True)
            else:
                return read_object(path, **{"map_location": location, **self.options})
        self.mapped.extend(leaf for _, leaf in walk(state) if isinstance(leaf, Tensor))
        return state

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a file: other files in its folder may be anybody's."""
        return (self.folder / name).is_file() if self.manifest is None else name in self.manifest.files

    def shards(self, name: str) -> Shards | None:
        """Return the folder of shards of a name and its index, if there is one."""
        return Shards.of(self.folder / name) if self.has(f"{name}/{INDEX_NAME}") else None

    def weights_name(self, index: int) -> str:
        """Return the weights file of a model; the usual name if the checkpoint has none."""
        names = layout.full_weights_names(index)
        return next(filter(self.has, names), names[0])

    def ranks(self) -> list[int]:
        """Return the ranks whose RNG states were saved."""
        count = self.manifest.world_size if self.manifest is not None else len(list(self.folder.iterdir()))
        return [rank for rank in range(count) if self.has(layout.rng_name(rank))]

    def random_states(self) -> tuple[int, dict[str, Any]]:
        """Return the RNG states that this rank restores, and before them the rank whose they are."""
        saved = self.ranks()
        if not saved:
            return self.rank, {}
        rank = self.rank if self.rank in saved else saved[self.rank % len(saved)]
        return rank, self.read(layout.rng_name(rank))


def _read(
    run: CheckpointContext, source: CheckpointReader
) -> tuple[list[Callable[..., object]], list[Callable[[], object]]]:
    """Read or map all files but shards, so that nothing has changed if one is damaged. No collective.

    Returns:
        What loads each model, with options of `load_state_dict`; what restores everything else, in order.
    """
    prepared, step, has_scaler = run.prepared, step_of(source), bool(run.precision.state_dict())
    models = [_model_loader(run, source, index) for index in range(len(prepared.models))]
    restores: list[Callable[[], object]] = [
        partial(_optimizer_loader(run, source, index), optimizer.optimizer)
        for index, optimizer in enumerate(prepared.optimizers)
    ]
    for index, scheduler in enumerate(prepared.schedulers):
        restores.append(partial(scheduler.load_state_dict, source.read(layout.scheduler_name(index))))
    if has_scaler and source.has(layout.SCALER_NAME):
        restores.append(partial(run.precision.load_state_dict, source.read(layout.SCALER_NAME)))
    elif has_scaler or source.has(layout.SCALER_NAME):
        logger.warning(
            "The checkpoint %s was saved %s a loss scaler, but this run is %s one.",
            source.folder,
            *(("without", "with") if has_scaler else ("with", "without")),
        )
    if run.recipe is not None and run.recipe.compute_scales is not None:
        restores.append(partial(run.recipe.compute_scales, prepared.models))
    restores += position_restores(source, prepared.dataloaders)
    for index, registered in enumerate(run.custom):
        restores.append(partial(registered.load_state_dict, source.read(layout.custom_name(index))))
    restores.append(partial(setattr, run.synchronizer, "step", step))
    # Last the generators, from which everything else may draw.
    restores.append(partial(restore_rng, source, *source.random_states(), run.strategy.generators))
    _warn_about_more(run, source)
    return models, restores


def _warn_about_more(run: CheckpointContext, source: CheckpointReader) -> None:
    """Warn about the states of objects that this run does not have."""
    objects: dict[Callable[[int], str], Sequence[Any]] = {
        layout.optimizer_name: run.prepared.optimizers,
        layout.sharded_optimizer_name: run.prepared.optimizers,
        layout.scheduler_name: run.prepared.schedulers,
        layout.custom_name: run.custom,
    }
    if not run.load_hooks:  # which may load models that were not prepared
        objects |= dict.fromkeys(layout.MODEL_NAMES, run.prepared.models)
    for name_of, known in objects.items():
        name = name_of(len(known))
        if source.has(name) or source.has(f"{name}/{INDEX_NAME}"):
            logger.warning(
                "%s is in the checkpoint %s, but no object was prepared or registered for it.",
                name,
                source.folder,
            )


def _model_loader(run: CheckpointContext, source: CheckpointReader, index: int) -> Callable[..., object]:
    shards = source.shards(layout.sharded_model_name(index))
    if shards is not None:
        return partial(restore_model_shards, run, shards)
    states, name = run.strategy.states, source.weights_name(index)
    if not source.has(name) and run.form is StateForm.NATIVE:
        local = _local(source.folder)

        def load_native(model: nn.Module, **options: Any) -> None:
            if options:
                logger.warning(
                    "load_state(%s): the strategy %r ignores this for files of its own.",
                    ", ".join(f"{name}={value!r}" for name, value in options.items()),
                    run.strategy.name,
                )
            states.load_native(model, local, index)

        return load_native
    read = None if source.has(name) else _foreign(source, index)
    if read is not None:
        return lambda model, **options: states.load_full_state_dict(model, read().weights(), **options)
    # Hooks may load what they have written themselves.
    state = None if run.load_hooks and not source.has(name) else source.read(name)

    def load_full(model: nn.Module, **options: Any) -> None:
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        saved = source.read(name) if state is None else state
        states.load_full_state_dict(model, with_tied_names(saved, core), **options)

    return load_full


def _optimizer_loader(
    run: CheckpointContext, source: CheckpointReader, index: int
) -> Callable[[Optimizer], object]:
    shards = source.shards(layout.sharded_optimizer_name(index))
    if shards is not None:
        return partial(restore_optimizer_shards, run, shards)
    states, models, name = run.strategy.states, run.prepared.models, layout.optimizer_name(index)
    if not source.has(name) and run.form is StateForm.NATIVE:
        return lambda _: None  # loaded with its model
    read = None if source.has(name) else _foreign(source, index)
    if read is None:
        state = source.read(name)
        return lambda optimizer: states.load_full_optimizer_state(optimizer, models, state)

    def load_foreign(optimizer: Optimizer) -> None:
        saved = read()
        numbered = saved.numbered_optimizer()
        if numbered is None:
            numbered = state_by_index(saved.optimizer(), parameter_names(optimizer, models))
        states.load_full_optimizer_state(optimizer, models, numbered)

    return load_foreign


def _foreign(source: CheckpointReader, index: int) -> Callable[[], Any] | None:
    """Return the function that reads what another engine has written of a model, if there is anything."""
    match = find_foreign(source.folder, layout.engine_name(index), index)
    if match is None:
        return None
    folder, read = match
    files = None if source.manifest is None else source.manifest.files
    is_listed = files is None or any(name.startswith(f"{folder.name}/") for name in files)
    return partial(read, _local(folder)) if is_listed else None


def _local(folder: AnyPath) -> Path:
    if isinstance(folder, RemotePath):
        raise CheckpointError(
            f"{str(folder)!r} has files of an engine, which only reads local files. Download it."
        )
    return folder


def _restore_models(
    run: CheckpointContext,
    source: CheckpointReader,
    loaders: list[Callable[..., object]],
    options: Mapping[str, Any],
) -> None:
    """Run the hooks, and restore the models that they have left in the list."""
    models, folder = run.bare_models, source.folder
    wrapped = dict(zip(map(id, models), run.prepared.models, strict=True))
    with ExitStack() as stack:
        stack.enter_context(raising_everywhere(run.main, WHAT))  # what follows has collectives
        if run.load_hooks and isinstance(folder, RemotePath):  # hooks read files of this machine
            local = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel-hooks-")))
            stores.download_others(folder, local)
            folder = local
        for hook in tuple(run.load_hooks.values()):
            hook(models, str(folder))
    for bare in models[: len(loaders)]:  # each loader is dropped with the state that it holds
        loaders.pop(0)(wrapped.get(id(bare), bare), **options)


def with_tied_names(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Add all names of tied weights, which are saved under one name; no hooks of the model are run.

    Example:
        >>> import torch
        >>> model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1, bias=False), "b": torch.nn.ReLU()})
        >>> model.b.weight = model.a.weight
        >>> sorted(with_tied_names({"a.weight": torch.ones(1, 1)}, model))
        ['a.weight', 'b.weight']
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= model.named_buffers(remove_duplicate=False)
    names: dict[object, list[str]] = {}
    absent = get_non_persistent_buffers(model, recurse=True, fqns=True)
    for name, value in tensors.items():
        if name in absent:
            continue
        same: object = id(value)  # tensors that wrap others, such as DTensor, may have no memory of their own
        if not is_traceable_wrapper_subclass(value) and value.numel() and not value.is_meta:
            same = tensor_memory(value), value.dtype
        names.setdefault(same, []).append(name if "_orig_mod" in name else strip_wrapper_prefixes(name))
    complete = dict(state)
    for group in names.values():
        known = next((name for name in group if name in state), None)
        if known is not None:
            complete |= {name: state[known] for name in group if name not in state}
    return complete


def position_restores(source: CheckpointReader, dataloaders: Sequence[Any]) -> list[Callable[[], object]]:
    """Return what resumes the epoch of the loaders, with any number of ranks.

    Stateful loaders, and those with `resume_mid_epoch`, resume at the next batch; others restart the epoch.
    """
    if not dataloaders:
        return []
    # Positions are global: with another world size that of any rank will do; rank 0 has one.
    same_world = source.manifest is None or source.manifest.world_size == source.world_size
    name = layout.position_name(source.rank)
    name = name if same_world and source.has(name) else layout.position_name(0)
    if source.has(name):
        states = source.read(name)["loaders"]
        if len(states) != len(dataloaders):
            logger.warning(
                "The checkpoint %s has the positions of %d data loaders, but %d are prepared.",
                source.folder,
                len(states),
                len(dataloaders),
            )
        return [
            partial(
                loader.load_state_dict
                if loader.resume_mid_epoch or loader.use_stateful_dataloader
                else loader.load_epoch,
                state,
            )
            for loader, state in zip(dataloaders, states, strict=False)
        ]
    # Those of another library.
    names = {loader: layout.loader_state_name(index) for index, loader in enumerate(dataloaders)}
    known = [loader for loader in dataloaders if loader.use_stateful_dataloader and source.has(names[loader])]
    if len(known) < len(dataloaders):
        logger.warning(
            "The checkpoint %s has no position of data loader(s) %s: they begin a new epoch.",
            source.folder,
            ", ".join(str(index) for index, loader in enumerate(dataloaders) if loader not in known),
        )
    if source.has(layout.sampler_name(0)):
        logger.warning("%s holds a pickled sampler and is not read.", source.folder / layout.sampler_name(0))
    return [partial(loader.load_state_dict, source.read(names[loader])) for loader in known]


def step_of(source: CheckpointReader) -> int:
    """Return the number of micro-batches after the last optimizer step at the time of saving."""
    if source.manifest is not None:
        return source.manifest.step
    return int(source.random_states()[1].get("step", 0))  # other libraries keep the number there


def restore_rng(
    source: CheckpointReader,
    saved_rank: int,
    states: Mapping[str, Any],
    generators: Generators | None = None,
) -> None:
    """Restore the RNG states of this rank, or seed from those of another one; restore those of an engine.

    A collective over ranks that share layers.
    """
    if not states:
        logger.warning("The checkpoint %s has no random number states.", source.folder)
        return
    complaints: list[str] = []
    if saved_rank == source.rank:
        own = process_generators(source.device)
        kept = {key: state for key, state in states.items() if state != []}  # of Accelerate, without devices
        for key in own.keys() & kept:
            own[key][1](kept[key])
        complaints += [f"{key!r} is absent" for key in sorted(own.keys() - states)]
        more = kept.keys() - own.keys() - {"step", ENGINE_KEY}
        complaints += [f"{key!r} is for devices that this machine lacks" for key in sorted(more)]
    else:
        digest = hashlib.blake2b(digest_size=8)
        digest.update(states[TORCH_KEY].numpy().tobytes() if TORCH_KEY in states else b"")
        digest.update(str(source.rank).encode())
        seed = int.from_bytes(digest.digest(), "little") >> 1
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)  # seeds the generators of all devices
        logger.warning(
            "The checkpoint %s is from %d rank(s): the random numbers of rank %d are seeded from those "
            "of rank %d.",
            source.folder,
            len(source.ranks()),
            source.rank,
            saved_rank,
        )
    synchronize_tensor_parallel_rng()  # ranks that had other numbers may share layers now
    if generators is not None:
        complaints += filter(None, [generators.load_state_dict(states.get(ENGINE_KEY, {}))])
    elif ENGINE_KEY in states:
        complaints.append(f"{ENGINE_KEY!r} is from an engine that is not in use")
    if complaints and saved_rank == source.rank:
        logger.warning(
            "Random number states of rank %d, from %s, were partly restored: %s.",
            source.rank,
            source.folder,
            "; ".join(complaints),
        )


def restore_model_shards(
    run: CheckpointContext, shards: Shards, model: nn.Module, *, strict: bool = True, **options: Any
) -> None:
    """Load a model from shards, for any current sharding."""
    folder, index = shards.folder, shards.index
    if not run.strategy.states.is_sharded:
        state = sharding.folder.read_all(folder, _full, index)
        run.strategy.states.load_full_state_dict(model, _unwrap(state), strict=strict, **options)
        return
    tensors = run.strategy.states.model_tensors(model)
    wrapped: dict[str, Any] = {MODEL_KEY: tensors}
    entries = sharding.folder.entries(index)
    paths = [entry.path for entry in entries]
    # What `Module.get_extra_state` returned is allocated in the shape in which it was saved.
    extra = {str(entry.path[-1]): entry for entry in entries if str(entry.path[-1]).endswith("_extra_state")}
    tensors.update({name: _full(entry) for name, entry in extra.items() if entry.shape and name in tensors})
    if strict:
        known = {path for path in paths if path[1:2] and path[1] in tensors}  # further keys are in a value
        unknown = sorted({".".join(map(str, path[1:])) for path in paths if path not in known})
        if unknown:
            raise CheckpointError(
                f"{str(folder)!r} has {unknown[0]!r}, which {type(model).__name__} does not have. Pass "
                "strict=False to load the rest."
            )
    sharding.folder.read_into(folder, wrapped, index, strict=strict)
    run.strategy.states.load_model(model, wrapped[MODEL_KEY], strict=strict, **options)


def restore_optimizer_shards(run: CheckpointContext, shards: Shards, optimizer: Optimizer) -> None:
    """Load an optimizer from shards, for any current sharding."""
    models, folder, index = run.prepared.models, shards.folder, shards.index
    if not run.strategy.states.is_sharded:
        state = _unwrap(sharding.folder.read_all(folder, _full, index))
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

    state = _unwrap(sharding.folder.read_all(folder, allocate, index))
    state.setdefault("state", {})
    run.strategy.states.load_optimizer(optimizer, models, state)


def _unwrap(state: dict[str, Any]) -> dict[str, Any]:
    """Return the value of a state's only key."""
    values = [*state.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], dict) else state


def _full(entry: TensorMetadata) -> Tensor:
    return torch.empty(entry.shape or (), dtype=entry.dtype, device="cpu")
