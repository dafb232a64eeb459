"""Load a checkpoint: open it on every rank, verify its files, restore the objects of the run.

Nothing changes in the run before all ranks have opened the same checkpoint and verified it.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, field, replace
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
from accel_ops.weights.tensors import id_tensor_storage
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
from accel_train.checkpoint.files import HashedBytes, HashedReader, record_of, record_of_mapping
from accel_train.checkpoint.folder import SMALL, complete_everywhere, is_unchanged
from accel_train.checkpoint.layout import FileRecord, Manifest, shares
from accel_train.checkpoint.staging import location_of, read_object

logger = logging.getLogger(__name__)
WHAT = "load_state()"


def load(
    run: CheckpointContext,
    input_dir: str | os.PathLike[str] | None,
    *,
    options: Mapping[str, Any],
    model_options: Mapping[str, Any],
) -> AnyPath:
    """Load the state of a run, as `Accelerator.load_state`; return the folder of the checkpoint."""
    run.finish()
    # 1. Open and verify the newest complete checkpoint.
    to_model = dict(model_options)
    location = location_of(to_model.pop("map_location", None), run.runtime.device)
    candidates = _candidates(run, input_dir)
    source = open_newest_complete(run, candidates, {"map_location": location, "options": options})
    # 2. Restore the objects of this rank.
    with run.raising_everywhere(WHAT):
        try:
            with releasable(source.mapped_tensors()):
                _restore(run, source, to_model)
        except RuntimeError as error:
            error.args = (shortened(str(error)),)
            raise
        if not source.is_open and not is_unchanged(source.folder, source.manifest):
            raise CheckpointError(
                f"{str(source.folder)!r} was replaced while it was loaded, so the loaded state may mix "
                "two checkpoints. Call load_state() again."
            )
    logger.info("Loaded the state from %s.", source.folder)
    return source.folder


def has_checkpoint(run: CheckpointContext) -> bool:
    """Return whether there is a complete numbered checkpoint; call it on every rank."""
    run.finish()
    if not run.is_automatic:
        return False
    return bool(_complete_on_all(_gather_proposals(run, None, "has_checkpoint")))


@frozen
class LoadProposal:
    """One rank's view of the checkpoint before loading.

    Args:
        asked: The `input_dir` of the call.
        complete: The complete numbered checkpoints; `None` on ranks that do not look for them.
        following: The number of the next checkpoint.
        problem: Why there is no such folder, or why it cannot be read.
    """

    asked: str | None
    complete: list[int] | None = None
    following: int = 0
    problem: str = ""


def _candidates(run: CheckpointContext, input_dir: str | os.PathLike[str] | None) -> list[AnyPath]:
    """Return the requested folder, or the numbered checkpoints that look complete, newest first."""
    if input_dir is None and not run.is_automatic:
        raise SettingsError(
            "load_state() needs an input_dir, unless the Accelerator has a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    requested = None if input_dir is None else any_path(input_dir, "load_state(input_dir)")
    proposals = _gather_proposals(run, None if input_dir is None else str(input_dir), WHAT)
    if run.is_automatic:
        run.project.iteration = max(proposal.following for proposal in proposals)
    if requested is not None:
        return [requested]
    complete = _complete_on_all(proposals)
    if not complete:
        raise CheckpointError(
            f"There is no complete checkpoint in {str(run.numbered)!r}. Check "
            "accelerator.has_checkpoint before load_state()."
        )
    return [run.numbered / layout.numbered_name(iteration) for iteration in reversed(complete)]


def _gather_proposals(run: CheckpointContext, asked: str | None, operation: str) -> list[LoadProposal]:
    """All-gather the proposals of all ranks; refuse different arguments."""
    local = _find_candidates(run, asked) if run.commits else LoadProposal(asked=asked)
    proposals = [LoadProposal(**row) for row in run.main.exchange(operation, asdict(local))]
    is_shared = not run.project.save_on_each_node
    requests = [proposal.asked for proposal in proposals]
    if any(request != asked for request in requests if is_shared or None in {request, asked}):
        raise DistributedOperationException(
            "load_state() was called for different folders: "
            + "; ".join(f"rank {rank}: {request!r}" for rank, request in enumerate(requests))
        )
    problem = first_problem(proposal.problem for proposal in proposals)
    if problem:
        raise CheckpointError(problem)
    return proposals


def _find_candidates(run: CheckpointContext, asked: str | None) -> LoadProposal:
    """Find the checkpoints that this rank could load."""
    complete, following = None, 0
    try:
        if run.is_automatic:
            if asked is None:
                complete = folders.list_complete(run.numbered)
            following = max(folders.numbers(run.numbered), default=-1) + 1
        if asked is not None:
            requested = any_path(asked, "load_state(input_dir)")
            if not requested.is_dir():
                return LoadProposal(asked=asked, problem=f"there is no folder {asked!r}")
            folders.recover(requested)
        return LoadProposal(asked=asked, complete=complete, following=following)
    except (OSError, CheckpointError) as error:
        return LoadProposal(asked=asked, problem=f"{error}")


def _complete_on_all(proposals: Iterable[LoadProposal]) -> list[int]:
    """Return the numbered checkpoints that are complete on every node, oldest first."""
    return complete_everywhere([row.complete for row in proposals if row.complete is not None])


def open_newest_complete(
    run: CheckpointContext, candidates: Sequence[AnyPath], options: Mapping[str, Any]
) -> CheckpointReader:
    """Open the newest complete checkpoint, the same on every rank.

    Args:
        run: The run to load into.
        candidates: The folders to try, newest first.
        options: More arguments of `CheckpointReader`.

    Raises:
        CheckpointError: None of them is complete, or what was saved does not fit the run.
    """
    problems: list[str] = []
    for folder in candidates:
        source = _attempt(run, folder, options)
        if isinstance(source, CheckpointReader):
            return source
        problems.append(source)
        if len(candidates) > 1:
            logger.warning("Skipped: %s", source)
    raise CheckpointError(problems[0] if len(problems) == 1 else f"No checkpoint is complete. {problems[0]}")


def _attempt(run: CheckpointContext, folder: AnyPath, options: Mapping[str, Any]) -> CheckpointReader | str:
    """Open a checkpoint; return its problem, if there is one."""
    # 1. Find the checkpoint, and map the weights.
    source, absent = _locate(run, folder, options)
    concurrent, remaining = _to_verify(run, source)
    has_models, failure = (False, None) if absent else _result_or_error(_open_models, run, source)
    # 2. Read all other files, while a thread verifies those that are not hashed by reading them.
    with ThreadPoolExecutor(1, "accel-verify") as thread:
        damage = thread.submit(_verify, replace(source, records={}), concurrent) if concurrent else None
        if not absent and failure is None:
            has_others, failure = _result_or_error(_open_others, run, source)
            source = replace(source, is_open=has_models and has_others)
        damaged = absent or _verify(source, remaining) or (damage and damage.result()) or ""
    # 3. Agree on one undamaged checkpoint.
    damages = _exchange(run, source, damaged)
    if damages:
        return damages
    # 4. Agree that every rank could read it.
    is_known = isinstance(failure, (OSError, CheckpointError))
    problem = "" if failure is None else str(failure) if is_known else repr(failure)
    problems = _exchange(run, source, problem)
    if failure is not None and not is_known:
        raise failure
    if problems and source.manifest is not None:  # the checkpoint is complete, and is of other objects
        raise CheckpointError(problems)
    return problems or source


def _result_or_error(
    step: Callable[[CheckpointContext, CheckpointReader], bool],
    run: CheckpointContext,
    source: CheckpointReader,
) -> tuple[bool, Exception | None]:
    """Return what a step returns, and its error, which goes to all ranks."""
    try:
        return step(run, source), None
    except Exception as error:  # noqa: BLE001 - classes of users may be unpickled
        return False, error


@frozen
class CheckpointReader:
    """A checkpoint that one rank reads.

    Args:
        manifest: `None` for a checkpoint that another library wrote.
        map_location: The device to which optimizer states are read first.
        opened: The contents of files that were read before they are needed, by name.
        records: Size and checksum of the files that were hashed while they were read.
        mapped: The safetensors files that are mapped.
        mappable: Whether other files are mapped, by name.
        is_open: Whether `opened` has all files that are needed.
    """

    folder: AnyPath
    manifest: Manifest | None
    rank: int
    world_size: int
    device: torch.device
    map_location: torch.device = torch.device("cpu")
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    opened: dict[str, Any] = field(default_factory=dict[str, Any])
    records: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    mapped: dict[str, SafetensorsFile] = field(default_factory=dict[str, SafetensorsFile])
    mappable: dict[str, bool] = field(default_factory=dict[str, bool])
    is_open: bool = False

    def hashes(self, name: str) -> bool:
        """Return whether `open` hashes a file while it reads it; it reads no mapped file and no shard."""
        listed = self.manifest is not None and name in self.manifest.files and "/" not in name
        is_mapped = name.endswith(SAFETENSORS_SUFFIX) and isinstance(self.folder, Path)
        return listed and not is_mapped and not self.options.get("mmap") and not self.maps(name)

    def maps(self, name: str) -> bool:
        """Return whether `open` maps a large file of `torch.save`, to copy its tensors one by one."""
        if name not in self.mappable:
            path = self.folder / name
            self.mappable[name] = (
                name.startswith((layout.OPTIMIZER_NAME, MODEL_NAME))
                and not self.options
                and self.map_location.type == "cpu"
                and isinstance(path, Path)
                and path.is_file()
                and path.stat().st_size >= SMALL
                and is_mappable(path)
            )
        return self.mappable[name]

    def open(self, name: str, **options: Any) -> None:
        """Read one file, for `read` to return it later."""
        if self.maps(name):
            self.opened[name] = read_object(self._path(name), mmap=True)
            return
        if self.manifest is None or not self.hashes(name):
            self.opened[name] = self.read(name, **options)
            return
        path = self._path(name)
        is_weights = name.endswith(SAFETENSORS_SUFFIX)
        is_small = self.manifest.files[name].size < SMALL and not is_weights
        with HashedBytes(path) if is_small else HashedReader(path) as file:
            if is_weights:
                self.opened[name] = _read_weights(path, file)
            else:
                self.opened[name] = read_object(path, file=file, **{**options, **self.options})
            self.records[name] = file.finish()

    def mapped_tensors(self) -> list[Tensor]:
        """Return the tensors of all mapped files that are open."""
        files = [state for name, state in self.opened.items() if name in self.mapped or self.maps(name)]
        return [leaf for file in files for _, leaf in walk(file) if isinstance(leaf, Tensor)]

    def record_of(self, name: str) -> FileRecord:
        """Return the size and the checksum of a file: of its mapping if it is open, else of the file on disk.

        Raises:
            OSError: It cannot be read.
        """
        mapped = self.mapped.get(name)
        return record_of(self.folder / name) if mapped is None else record_of_mapping(mapped)

    def read(self, name: str, **options: Any) -> Any:
        """Read one file. Safetensors are mapped: they stay what they are if the file is replaced.

        Raises:
            CheckpointError: The file is absent or damaged, or holds objects that are unsafe to load.
        """
        if name in self.opened:
            return self.opened.pop(name)
        path = self._path(name)
        if name.endswith(SAFETENSORS_SUFFIX):
            file = SafetensorsFile(path)
            if isinstance(path, Path):
                self.mapped[name] = file
            return {key: file.tensor(key) for key in file.entries}
        return read_object(path, **{**options, **self.options})

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


def _read_weights(path: AnyPath, file: HashedReader | HashedBytes) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file at once, since each request to a store takes its time."""
    header = SafetensorsFile(path)
    content = bytearray(header.size)
    file.readinto(content)
    return {
        name: torch.frombuffer(
            content, dtype=entry.dtype, count=math.prod(entry.shape), offset=entry.begin
        ).view(entry.shape)
        if entry.nbytes
        else torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for name, entry in header.entries.items()
    }


def _locate(
    run: CheckpointContext, folder: AnyPath, options: Mapping[str, Any]
) -> tuple[CheckpointReader, str]:
    """Return a checkpoint, and the problem of its folder."""
    manifest, problem = None, ""
    try:
        manifest = folders.read_manifest(folder)
        folders.check(folder)
    except (OSError, CheckpointError) as error:
        problem = str(error)
    source = CheckpointReader(
        folder=folder,
        manifest=manifest,
        rank=run.rank,
        world_size=run.runtime.topology.world_size,
        device=run.runtime.device,
        **options,
    )
    return source, problem


def _open_models(run: CheckpointContext, source: CheckpointReader) -> bool:
    """Map the weights; return whether no other files of models are needed. No collective."""
    if run.load_hooks:  # hooks may load models themselves, and take them from the list
        return False
    count = len(run.prepared.models)
    full = [index for index in range(count) if model_loader(run, source, index) is None]
    for index in full:
        source.open(source.weights_name(index))
    return len(full) == count


def _open_others(run: CheckpointContext, source: CheckpointReader) -> bool:
    """Read all files but the models'; return whether no other files are needed. No collective."""
    prepared = run.prepared
    shards = [optimizer_loader(run, source, index) for index in range(len(prepared.optimizers))]
    names = [layout.optimizer_name(index) for index, load in enumerate(shards) if load is None]
    names += map(layout.scheduler_name, range(len(prepared.schedulers)))
    names += map(layout.custom_name, range(len(run.custom)))
    for name in names:
        source.open(name, map_location=source.map_location)
    optional = [source.rng_name()]
    if run.precision.state_dict():
        optional.append(layout.SCALER_NAME)
    if prepared.dataloaders:
        optional.append(source.position_name())
    for name in optional:
        if name is not None and source.has(name):
            source.open(name)
    return not any(shards)


def _to_verify(run: CheckpointContext, source: CheckpointReader) -> tuple[list[str], list[str]]:
    """Return this rank's share of the files: those to verify while other files are read, and after that."""
    if source.manifest is None:
        return [], []
    topology = run.runtime.topology
    num_readers = topology.local_world_size if run.project.save_on_each_node else topology.world_size
    files = source.manifest.files
    names = shares(files, num_readers)[run.rank - run.committer]
    concurrent = [name for name in names if files[name].size > folders.SMALL and not source.hashes(name)]
    return concurrent, [name for name in names if name not in concurrent]


def _verify(source: CheckpointReader, names: Sequence[str]) -> str:
    """Verify some files, and those that were hashed while they were read; return the problem."""
    if source.manifest is None:
        return ""
    try:
        folders.verify(source.folder, source.manifest, names, source.records, source.record_of)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _exchange(run: CheckpointContext, source: CheckpointReader, problem: str) -> str:
    """Return the first problem of all ranks, or that the checkpoint was replaced while they opened it."""
    text = "" if source.manifest is None else source.manifest.to_text()
    digest = xxhash.xxh3_64(text.encode()).hexdigest() if text else ""
    view = digest, is_unchanged(source.folder, source.manifest), problem
    digests, unchanged, problems = zip(*run.main.exchange(WHAT, view), strict=True)
    is_shared = not run.project.save_on_each_node
    if all(unchanged) and not (is_shared and len({*digests} - {""}) > 1):
        return first_problem(problems)
    return f"{str(source.folder)!r} is being replaced by another process. Call load_state() again."


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
        more = layout.weights_name(count, safe=True), layout.weights_name(count, safe=False)
        _warn_about_more(source, *more, layout.sharded_model_name(count))
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
            begin = (id_tensor_storage(value), value.storage_offset())
            same = (begin, value.dtype, tuple(value.shape), value.stride())
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
            state = source.read(layout.optimizer_name(index), map_location=source.map_location)
            load(prepared.optimizer, models, state)
    count = len(optimizers)
    _warn_about_more(source, layout.optimizer_name(count), layout.sharded_optimizer_name(count))


def restore_states(
    source: CheckpointReader, name_of: Callable[[int], str], loads: Sequence[Callable[[Any], Any]]
) -> None:
    """Load the state of optimizers, schedulers or registered objects."""
    for index, load in enumerate(loads):
        load(source.read(name_of(index), map_location=source.map_location))
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


_MOST_NAMES = 20


def shortened(message: str) -> str:
    """Shorten the message of a `Module.load_state_dict` error that names thousands of tensors.

    Example:
        >>> len(shortened(", ".join(["name"] * 30_000))) < 200
        True
    """
    lines = [_shorten_list(line, ", ") for line in message.split("\n")]
    return _shorten_list("\n".join(lines), "\n")


def _shorten_list(text: str, separator: str) -> str:
    items = text.split(separator)
    remaining = len(items) - _MOST_NAMES
    return text if remaining <= 0 else separator.join([*items[:_MOST_NAMES], f"and {remaining} more"])
