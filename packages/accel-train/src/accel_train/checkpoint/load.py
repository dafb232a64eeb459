"""Load a checkpoint: verify its files, read them on every rank, restore the objects of the run.

Nothing changes in the run before all ranks have verified and read the same checkpoint.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from accel_ops.modules import extract_model_from_parallel
from accel_ops.tree import walk
from accel_ops.weights.layout import MODEL_NAME, SAFETENSORS_SUFFIX
from accel_ops.weights.mapped import releasable
from accel_ops.weights.read import is_mappable
from accel_ops.weights.safetensors_io import SafetensorsFile
from accel_ops.weights.tensors import tensor_memory
from accel_plugins.sharding.state import INDEX_NAME, strip_wrapper_prefixes
from accel_plugins.strategy import Generators
from accel_state.errors import CheckpointError, DistributedOperationException, SettingsError
from accel_state.files import any_path
from accel_state.frozen import frozen
from accel_state.remote import AnyPath
from accel_state.torch_private import is_traceable_wrapper_subclass
from accel_train.checkpoint import folder as folders
from accel_train.checkpoint import layout, stores
from accel_train.checkpoint.agreement import first_problem
from accel_train.checkpoint.contents import (
    ENGINE_KEY,
    model_loader,
    optimizer_loader,
    seed_per_rank,
    write_rng,
)
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.folder import is_unchanged
from accel_train.checkpoint.layout import Manifest
from accel_train.checkpoint.staging import location_of, read_object
from accel_train.checkpoint.stores import on_disk

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
    # 1. Find the newest complete checkpoint, and read it.
    to_model = dict(model_options)
    location = location_of(to_model.pop("map_location", None), run.runtime.device)
    source = _newest_complete(run, _candidates(run, input_dir), location, options, verifies=verify)
    with run.raising_everywhere(WHAT), _of_one_state(source):
        _read(run, source)
    # 2. Restore the objects of this rank.
    with run.raising_everywhere(WHAT), _of_one_state(source), releasable(source.mapped):
        _restore(run, source, to_model)
    logger.info("Loaded the state from %s.", source.folder)
    return source.folder


def has_checkpoint(run: CheckpointContext) -> bool:
    """Return whether there is a complete numbered checkpoint; call it on every rank."""
    run.finish()
    if not run.is_automatic:
        return False
    return bool(_find(run, None, "has_checkpoint"))


def _candidates(run: CheckpointContext, input_dir: str | os.PathLike[str] | None) -> list[AnyPath]:
    """Return the requested folder, or the numbered checkpoints that look complete, newest first."""
    if input_dir is None and not run.is_automatic:
        raise SettingsError(
            "load_state() needs an input_dir, unless the Accelerator has a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    requested = None if input_dir is None else any_path(input_dir, "load_state(input_dir)")
    complete = _find(run, None if input_dir is None else str(input_dir), WHAT)
    if requested is not None:
        return [requested]
    if not complete:
        raise CheckpointError(
            f"There is no complete checkpoint in {str(run.numbered)!r}. Check "
            "accelerator.has_checkpoint before load_state()."
        )
    return [run.numbered / layout.numbered_name(iteration) for iteration in reversed(complete)]


def _find(run: CheckpointContext, asked: str | None, operation: str) -> list[int]:
    """Find what can be loaded, and the number of the next checkpoint, which is set where something is loaded.

    Returns:
        The numbered checkpoints that are complete on every node, oldest first, if none is `asked` for.
    """
    # 1. Look on the ranks that commit.
    complete: list[int] | None = None
    following, problem = 0, ""
    try:
        if run.commits and run.is_automatic:
            complete = folders.list_complete(run.numbered) if asked is None else None
            following = max(folders.numbers(run.numbered), default=-1) + 1
        if run.commits and asked is not None:
            requested = any_path(asked, "load_state(input_dir)")
            problem = "" if requested.is_dir() else f"there is no folder {asked!r}"
            folders.recover(requested)
    except (OSError, CheckpointError) as error:
        problem = f"{error}"
    # 2. Agree with the other ranks.
    rows = run.main.exchange(operation, (asked, complete, following, problem))
    requests, found, numbers, problems = zip(*rows, strict=True)
    is_shared = not run.project.save_on_each_node
    if any(request != asked for request in requests if is_shared or None in {request, asked}):
        raise DistributedOperationException(
            "load_state() was called for different folders: "
            + "; ".join(f"rank {rank}: {request!r}" for rank, request in enumerate(requests))
        )
    problem = first_problem(problems)
    if problem:
        raise CheckpointError(problem)
    if run.is_automatic and operation == WHAT:
        run.project.iteration = max(numbers)
    nodes = [{*numbers} for numbers in found if numbers is not None]
    return sorted(set[int].intersection(*nodes)) if nodes else []


def _newest_complete(
    run: CheckpointContext,
    candidates: Sequence[AnyPath],
    location: torch.device,
    options: Mapping[str, Any],
    *,
    verifies: bool,
) -> CheckpointReader:
    """Return the newest complete checkpoint, the same on every rank.

    Args:
        run: The run to load into.
        candidates: The folders to try, newest first.
        location: The device to which optimizer states are read first.
        options: More arguments of `torch.load`.
        verifies: Whether the ranks, which share the files, compare checksums.

    Raises:
        CheckpointError: None of them is complete.
    """
    problems: list[str] = []
    for folder in candidates:
        # 1. Check the folder, and this rank's share of the files.
        manifest, problem = None, ""
        try:
            manifest = folders.read_manifest(folder)
            folders.check(folder, manifest)
            if verifies and manifest is not None:
                folders.verify(folder, manifest, _names_to_verify(run, manifest))
        except (OSError, CheckpointError) as error:
            problem = str(error) if is_unchanged(folder, manifest) else _replaced(folder)
        # 2. Agree on one undamaged checkpoint.
        text = "" if manifest is None else manifest.to_text()
        digest = xxhash.xxh3_64(text.encode()).hexdigest() if text else ""
        digests, found = zip(*run.main.exchange(WHAT, (digest, problem)), strict=True)
        differ = not run.project.save_on_each_node and len({*digests} - {""}) > 1
        problem = _replaced(folder) if differ else first_problem(found)
        if not problem:
            topology = run.runtime.topology
            return CheckpointReader(
                folder=folder,
                manifest=manifest,
                rank=topology.rank,
                world_size=topology.world_size,
                device=run.runtime.device,
                map_location=location,
                options=options,
            )
        problems.append(problem)
        if len(candidates) > 1:
            logger.warning("Skipped: %s", problem)
    raise CheckpointError(problems[0] if len(problems) == 1 else f"No checkpoint is complete. {problems[0]}")


def _names_to_verify(run: CheckpointContext, manifest: Manifest) -> list[str]:
    """Return this rank's share of the files: about as many bytes as others have."""
    topology = run.runtime.topology
    num_readers = topology.local_world_size if run.project.save_on_each_node else topology.world_size
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    return by_size[run.rank - run.committer :: num_readers]


def _replaced(folder: AnyPath) -> str:
    return f"{str(folder)!r} was replaced by another process while it was loaded. Call load_state() again."


@contextmanager
def _of_one_state(source: CheckpointReader) -> Generator[None]:
    """Raise an error if another process replaces the checkpoint within the block, instead of what follows."""
    try:
        yield
    except (OSError, CheckpointError):
        if is_unchanged(source.folder, source.manifest):
            raise
    if not is_unchanged(source.folder, source.manifest):
        raise CheckpointError(_replaced(source.folder))


@frozen
class CheckpointReader:
    """A checkpoint that one rank reads.

    Args:
        manifest: `None` for a checkpoint that another library wrote.
        map_location: The device to which optimizer states are read first.
        options: More arguments of `torch.load`.
        opened: The contents of files that were read before they are needed, by name.
        mapped: The tensors of mapped files.
    """

    folder: AnyPath
    manifest: Manifest | None
    rank: int
    world_size: int
    device: torch.device
    map_location: torch.device = torch.device("cpu")
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opened: dict[str, Any] = field(default_factory=dict[str, Any])
    mapped: list[Tensor] = field(default_factory=list[Tensor])

    def read(self, name: str) -> Any:
        """Read one file. Safetensors, and other large files of tensors, are mapped.

        Raises:
            CheckpointError: The file is absent or damaged, or holds objects that are unsafe to load.
        """
        if name in self.opened:
            return self.opened.pop(name)
        is_optimizer = name.startswith(layout.OPTIMIZER_NAME)
        location = self.map_location if is_optimizer else torch.device("cpu")
        with on_disk(self._path(name)) as path:
            if name.endswith(SAFETENSORS_SUFFIX):
                file = SafetensorsFile(path)
                state: Any = {key: file.tensor(key) for key in file.entries}
            elif self._maps(name, path, location):
                state = read_object(path, mmap=True)
            else:
                return read_object(path, **{"map_location": location, **self.options})
        self.mapped.extend(leaf for _, leaf in walk(state) if isinstance(leaf, Tensor))
        return state

    def _maps(self, name: str, path: Path, location: torch.device) -> bool:
        """Return whether a file of `torch.save` is mapped, so that its tensors are copied one by one."""
        has_tensors = name.startswith((layout.OPTIMIZER_NAME, MODEL_NAME))
        is_large = has_tensors and not self.options and path.stat().st_size >= _MAPPED_FROM
        return is_large and location.type == "cpu" and is_mappable(path)

    def _path(self, name: str) -> AnyPath:
        path = self.folder / name
        if not self.has(name):
            raise CheckpointError(
                f"The checkpoint {str(self.folder)!r} has no {name!r}. Prepare and register the same "
                "objects, in the same order, as in the run that was saved."
            )
        return path

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a file: other files in its folder may be anybody's."""
        return (self.folder / name).is_file() if self.manifest is None else name in self.manifest.files

    def weights_name(self, index: int) -> str:
        """Return the weights file of a model; the usual name if the checkpoint has none."""
        names = layout.full_weights_names(index)
        return next(filter(self.has, names), names[0])

    def position_name(self) -> str:
        """Return the file with the positions of this rank's loaders, if there is one."""
        # Positions are global: with another world size that of any rank will do; rank 0 has one.
        own = layout.position_name(self.rank)
        same_world = self.manifest is None or self.manifest.world_size == self.world_size
        return own if same_world and self.has(own) else layout.position_name(0)

    def rng_name(self) -> str | None:
        """Return the file with the RNG states that this rank reads, if there is one."""
        rank = self.rng_rank()
        return None if rank is None else layout.rng_name(rank)

    def rng_rank(self) -> int | None:
        """Return the rank whose RNG states this rank reads: its own, or another rank's if it has none."""
        saved = self.ranks()
        if not saved or self.rank in saved:
            return self.rank if saved else None
        return saved[self.rank % len(saved)]

    def ranks(self) -> list[int]:
        """Return the ranks whose RNG states were saved."""
        count = self.manifest.world_size if self.manifest is not None else len(list(self.folder.iterdir()))
        return [rank for rank in range(count) if self.has(layout.rng_name(rank))]


def _read(run: CheckpointContext, source: CheckpointReader) -> None:
    """Read or map all files but shards, and models that hooks may load themselves. No collective."""
    prepared = run.prepared
    models = [] if run.load_hooks else range(len(prepared.models))
    names = [source.weights_name(index) for index in models if model_loader(run, source, index) is None]
    names += [
        layout.optimizer_name(index)
        for index in range(len(prepared.optimizers))
        if optimizer_loader(run, source, index) is None
    ]
    names += map(layout.scheduler_name, range(len(prepared.schedulers)))
    names += map(layout.custom_name, range(len(run.custom)))
    optional = [source.rng_name()]
    if run.precision.state_dict():
        optional.append(layout.SCALER_NAME)
    if prepared.dataloaders:
        optional.append(source.position_name())
    names += [name for name in optional if name is not None and source.has(name)]
    for name in names:
        source.opened[name] = source.read(name)


def _restore(run: CheckpointContext, source: CheckpointReader, to_model: Mapping[str, Any]) -> None:
    """Restore all objects of a run from an open checkpoint."""
    # 1. Run the hooks, and restore the models that they have left in the list.
    prepared = run.prepared
    models = run.bare_models
    wrapped = dict(zip(map(id, models), prepared.models, strict=True))
    with (
        run.raising_everywhere(WHAT),  # what follows has collectives
        hook_folder(source.folder, used=bool(run.load_hooks)) as folder,
    ):
        for hook in tuple(run.load_hooks.values()):
            hook(models, str(folder))
    for index, model in enumerate(wrapped.get(id(bare), bare) for bare in models):
        load_shards = model_loader(run, source, index)
        if load_shards is not None:
            load_shards(model, **to_model)
            continue
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        load = partial(run.strategy.states.load_full_state_dict, model)
        restore_model(source, index, core, load=load, **to_model)
    if not run.load_hooks:
        count = len(models)
        _warn_about_more(source, *layout.full_weights_names(count), layout.sharded_model_name(count))
    # 2. Restore what trains them.
    _restore_optimizers(run, source)
    restore_states(
        source, layout.scheduler_name, [scheduler.load_state_dict for scheduler in prepared.schedulers]
    )
    scaler = run.precision.state_dict()
    if scaler and source.has(layout.SCALER_NAME):
        run.precision.load_state_dict(source.read(layout.SCALER_NAME))
    elif scaler or source.has(layout.SCALER_NAME):
        logger.warning(
            "The checkpoint %s was saved %s a loss scaler, but this run is %s one.",
            source.folder,
            *(("without", "with") if scaler else ("with", "without")),
        )
    if run.recipe is not None and run.recipe.compute_scales is not None:
        run.recipe.compute_scales(prepared.models)
    # 3. Restore positions, registered objects, and last the generators: everything above may draw from them.
    restore_positions(source, prepared.dataloaders)
    restore_states(source, layout.custom_name, [registered.load_state_dict for registered in run.custom])
    run.synchronizer.step = step_of(source)
    restore_rng(source, run.strategy.generators)


@contextmanager
def hook_folder(folder: AnyPath, *, used: bool) -> Generator[AnyPath]:
    """Give the folder for hooks: of a checkpoint on a store, one with the files that hooks have added."""
    if not used or isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="accel-hooks-") as local:
        stores.download_others(folder, Path(local))
        yield Path(local)


def restore_model(
    source: CheckpointReader,
    index: int,
    model: nn.Module,
    *,
    load: Callable[..., Any] | None = None,
    **options: Any,
) -> None:
    """Load the weights of a model."""
    state: Mapping[str, Any] = source.read(source.weights_name(index))
    complete = with_second_names(state, local_tensors(model))
    (load or model.load_state_dict)(complete, **options)


def local_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers under every name that they have in a state dict; no hooks are run.

    Example:
        >>> import torch
        >>> sorted(local_tensors(torch.nn.Linear(1, 1)))
        ['bias', 'weight']
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules(remove_duplicate=False):
        transient = module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(recurse=False):
            if name not in transient:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return {
        name if "_orig_mod" in name else strip_wrapper_prefixes(name): tensor
        for name, tensor in tensors.items()
    }


def with_second_names(state: Mapping[str, Any], like: Mapping[str, Tensor]) -> dict[str, Any]:
    """Add all names of tied weights, which are saved under one name.

    Example:
        >>> import torch
        >>> tied = torch.zeros(1)
        >>> sorted(with_second_names({"a": torch.ones(1)}, {"a": tied, "b": tied}))
        ['a', 'b']
    """
    names: dict[object, list[str]] = {}
    for name, value in like.items():
        same: object = id(value)  # tensors that wrap others, such as DTensor, may have no memory of their own
        if not is_traceable_wrapper_subclass(value) and value.numel() and not value.is_meta:
            same = tensor_memory(value), value.dtype
        names.setdefault(same, []).append(name)
    complete = dict(state)
    for group in names.values():
        known = next((name for name in group if name in state), None)
        if known is not None:
            complete |= {name: state[known] for name in group if name not in state}
    return complete


def _warn_about_more(source: CheckpointReader, *names: str) -> None:
    """Warn about files or folders of shards with the state of an object that the run does not have."""
    for name in names:
        if source.has(name) or source.has(f"{name}/{INDEX_NAME}"):
            logger.warning(
                "%s is in the checkpoint %s, but no object was prepared or registered for it.",
                name,
                source.folder,
            )


def _restore_optimizers(run: CheckpointContext, source: CheckpointReader) -> None:
    load = run.strategy.states.load_full_optimizer_state
    models, optimizers = run.prepared.models, run.prepared.optimizers
    for index, prepared in enumerate(optimizers):
        load_shards = optimizer_loader(run, source, index)
        if load_shards is not None:
            load_shards(prepared.optimizer)
        else:
            state = source.read(layout.optimizer_name(index))
            load(prepared.optimizer, models, state)
    count = len(optimizers)
    _warn_about_more(source, layout.optimizer_name(count), layout.sharded_optimizer_name(count))


def restore_states(
    source: CheckpointReader, name_of: Callable[[int], str], loads: Sequence[Callable[[Any], Any]]
) -> None:
    """Load the state of optimizers, schedulers or registered objects."""
    for index, load in enumerate(loads):
        load(source.read(name_of(index)))
    _warn_about_more(source, name_of(len(loads)))


def restore_positions(source: CheckpointReader, dataloaders: Sequence[Any]) -> None:
    """Resume the epoch of the loaders, with any number of ranks.

    Stateful loaders, and those with `resume_mid_epoch`, resume at the next batch; others restart the epoch.
    """
    if not dataloaders:
        return
    name = source.position_name()
    if not source.has(name):
        _restore_foreign_positions(source, dataloaders)
        return
    states = source.read(name)["loaders"]
    if len(states) != len(dataloaders):
        logger.warning(
            "The checkpoint %s has the positions of %d data loaders, but %d are prepared.",
            source.folder,
            len(states),
            len(dataloaders),
        )
    for loader, state in zip(dataloaders, states, strict=False):
        if loader.resume_mid_epoch or loader.use_stateful_dataloader:
            loader.load_state_dict(state)
        else:
            loader.load_epoch(state)


def _restore_foreign_positions(source: CheckpointReader, dataloaders: Sequence[Any]) -> None:
    lost: list[int] = []
    for index, loader in enumerate(dataloaders):
        name = layout.loader_state_name(index)
        if loader.use_stateful_dataloader and source.has(name):
            loader.load_state_dict(source.read(name))
        else:
            lost.append(index)
    if lost:
        logger.warning(
            "The checkpoint %s has no position of data loader(s) %s: they begin a new epoch.",
            source.folder,
            ", ".join(map(str, lost)),
        )
    unread = layout.sampler_name(0)
    if source.has(unread):
        logger.warning("%s contains a pickled sampler and is not read.", source.folder / unread)


def restore_rng(source: CheckpointReader, generators: Generators | None = None) -> None:
    """Restore the RNG states of this rank, and those of an engine."""
    saved_rank = source.rng_rank()
    if saved_rank is None:
        logger.warning("The checkpoint %s has no random number states.", source.folder)
        return
    states: dict[str, Any] = source.read(layout.rng_name(saved_rank))
    if saved_rank == source.rank:
        complaints = write_rng(states, source.device)
        complaints += _restore_engine(states, generators)
        if complaints:
            logger.warning(
                "Random number states of rank %d, from %s, were partly restored: %s.",
                source.rank,
                source.folder,
                "; ".join(complaints),
            )
    else:
        seed_per_rank(states, source.rank)
        _restore_engine(states, generators)
        logger.warning(
            "The checkpoint %s is from %d rank(s): the random numbers of rank %d are seeded from those "
            "of rank %d.",
            source.folder,
            len(source.ranks()),
            source.rank,
            saved_rank,
        )


def _restore_engine(states: Mapping[str, Any], generators: Generators | None) -> list[str]:
    if generators is None:
        return [f"{ENGINE_KEY!r} is from an engine that is not in use"] if ENGINE_KEY in states else []
    problem = generators.load_state_dict(states.get(ENGINE_KEY, {}))
    return [] if problem is None else [problem]


def step_of(source: CheckpointReader) -> int:
    """Return the number of micro-batches after the last optimizer step at the time of saving."""
    if source.manifest is not None:
        return source.manifest.step
    name = source.rng_name()  # other libraries keep the number there
    return 0 if name is None else int(source.read(name).get("step", 0))
