"""Save a checkpoint: agree on a staging folder, write every rank's files, commit them together.

Files are written at once, or copied to host memory and written by a thread.
"""

from __future__ import annotations

import logging
import os
import random
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from accel_ops.tree import is_dtensor
from accel_plugins import sharding
from accel_plugins.sharding.state import INDEX_NAME, StateForm, local_metadata_file, shard_file
from accel_state.device_kinds import runtime_module
from accel_state.errors import (
    CheckpointError,
    CheckpointWriteError,
    DistributedOperationException,
    SettingsError,
    UnsupportedError,
)
from accel_state.files import any_path
from accel_state.platforms import flush_file
from accel_state.remote import AnyPath, RemotePath
from accel_train import observing
from accel_train.checkpoint import folder, layout
from accel_train.checkpoint.agreement import AbsentRankError, Agreement, SingleProcess, raising_everywhere
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.files import make_folder, record_of, remove, sizes_in, write_file
from accel_train.checkpoint.layout import FileRecord, Manifest
from accel_train.checkpoint.staging import tensors_in, write_object, write_weights

logger = logging.getLogger(__name__)
WHAT = "save_state()"


def save(
    run: CheckpointContext,
    output_dir: str | os.PathLike[str] | None,
    *,
    safe: bool,
    blocking: bool,
    to_disk: bool,
) -> Saving:
    """Save the state of a run, as `Accelerator.save_state`; return the checkpoint, complete if `blocking`."""
    run.finish()
    target = target_of(run, output_dir)
    iteration, step = run.project.iteration if run.is_automatic else None, run.synchronizer.step
    observer, replicas = observing.observer, run.strategy.replicas
    is_observed = observer is not None and not observer.saved(
        run, target, partial(_files_of_run, run, SingleProcess(), safe=safe)
    )
    if is_observed or (replicas is not None and not replicas.is_saver):
        run.project.iteration += run.is_automatic
        return Saving(str(target))  # another replica group has the same state, and saves it
    # 1. Agree on a staging folder.
    call = {
        "folder": str(target),
        "iteration": iteration,
        "safe": safe,
        "blocking": blocking,
        "to_disk": to_disk,
    }
    main, background = run.main, run.background
    try:
        staging = _agree(run, call, target, main)
    except AbsentRankError as error:
        if run.rank > 0:
            run.project.iteration += run.is_automatic
            logger.warning("%s, which has saved without its random states.", error)
            return Saving(str(target))
        logger.warning(
            "save_state() was called only on rank 0, which saves its own state alone: the random states of "
            "other ranks are not in the checkpoint. Call it on every rank. (%s)",
            error,
        )
        main = background = SingleProcess()
        staging = _agree(run, call, target, main)
    if step:
        logger.warning(
            "The state is saved %d micro-batch(es) after the last optimizer step; their gradients are not "
            "part of it. Save `if accelerator.sync_gradients:`.",
            step,
        )
    run.project.iteration += run.is_automatic
    job = _Job(
        run=run,
        agreement=background,
        target=target,
        staging=staging,
        local=staging if isinstance(staging, Path) else Path(tempfile.mkdtemp(prefix="accel-upload-")),
        to_disk=to_disk,
        manifest=Manifest(world_size=background.world_size, step=step, iteration=iteration),
    )
    # 2. Collect the states, copied to host memory if a thread is to write them; write and commit them.
    failure: Exception | None = None
    try:
        job.files.extend(_files_of_run(run, main, job.local, safe=safe))
        if not blocking:
            job.files[:] = [file._replace(state=run.staging.copy(file.state)) for file in job.files]
    except Exception as error:  # noqa: BLE001 - hooks and state dicts are users' code, and all ranks need the error
        failure = error
        job.problem = f"rank {run.rank} failed before writing: {error!r}"
    except BaseException:
        job.clean()
        raise
    try:
        if not blocking and failure is None:
            run.saving = Saving(str(target), job.work)
            run.saving.start()
            return run.saving
        job.work()
    except CheckpointWriteError as error:
        raise error from failure
    finally:
        failure = None  # else a cycle: its traceback holds this frame
    logger.info("Saved the state to %s.", target)
    return Saving(str(target))


def target_of(run: CheckpointContext, output_dir: str | os.PathLike[str] | None) -> AnyPath:
    """Return the folder of the next checkpoint.

    Raises:
        SettingsError: There is none; each node would keep only a part of it; or a store cannot hold it.
    """
    if run.is_automatic:
        target = run.numbered / layout.numbered_name(run.project.iteration)
        if output_dir is not None:
            logger.warning(
                "save_state(%r): with automatic_checkpoint_naming, this checkpoint goes to %s.",
                str(output_dir),
                target,
            )
    elif output_dir is None:
        raise SettingsError(
            "save_state() needs an output_dir, unless the Accelerator has a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    else:
        target = any_path(output_dir, "save_state(output_dir)")
    topology, is_remote = run.runtime.topology, isinstance(target, RemotePath)
    if run.project.save_on_each_node:
        if topology.world_size > topology.local_world_size and run.form is not StateForm.FULL:
            raise SettingsError(
                "ProjectConfiguration(save_on_each_node=True): every host would keep only a part of the "
                "model. Use state_dict_type='FULL_STATE_DICT', or a folder that all hosts share."
            )
        if is_remote:
            raise SettingsError(
                f"ProjectConfiguration(save_on_each_node=True): all hosts share {str(target)!r}. Remove this "
                "option."
            )
    if is_remote and run.form is StateForm.NATIVE:
        raise SettingsError(
            f"The strategy {run.strategy.name!r} reads its files from a local folder, and {str(target)!r} "
            "is on an object store: save to a folder, or with state_dict_type='SHARDED_STATE_DICT'."
        )
    return target


def _agree(run: CheckpointContext, call: dict[str, Any], target: AnyPath, agreement: Agreement) -> AnyPath:
    """Agree with all ranks on the arguments; return the path to write to."""
    # 1. Make the staging folder. A number must be the largest: the newest checkpoint would be pruned first.
    staging, problem, exists, iteration = None, "", False, call["iteration"]
    if run.commits:
        try:
            numbers = [] if iteration is None else folder.numbers(target.parent, since=iteration)
            if numbers:
                exists, newest = True, target.parent / layout.numbered_name(numbers[-1])
                problem = (
                    f"{str(newest)!r} already exists from an earlier run. Resume from it with load_state(), "
                    f"or set ProjectConfiguration(iteration={numbers[-1] + 1})."
                )
            else:
                staging = folder.make_staging(target)
        except (OSError, CheckpointError) as error:
            name = getattr(error, "filename", None) or target
            problem = f"{str(name)!r} could not be created: {getattr(error, 'strerror', None) or error}"
    if run.project.save_on_each_node:  # hosts that share no file system may have folders of other names
        call = call | {"folder": ""}
    # 2. Compare what all ranks say. Rank 0 may save alone what it has in full.
    try:
        row = call, problem, exists, str(staging)
        rows = agreement.exchange(WHAT, row, alone=None if run.strategy.states.is_sharded else call)
        if any(other != call for other, *_ in rows):
            calls = [", ".join(map("{0[0]}={0[1]!r}".format, other.items())) for other, *_ in rows]
            raise DistributedOperationException(
                "save_state() was called with different arguments: "
                + "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(calls))
            )
        for rank, (_, problem, exists, _) in enumerate(rows):
            if problem:
                raise (SettingsError if exists else CheckpointWriteError)(f"rank {rank}: {problem}")
    except BaseException:
        if isinstance(staging, Path):  # the next save replaces what was uploaded to a store
            remove(staging)
        raise
    return any_path(rows[run.committer][-1], "the staging folder")


class CheckpointFile(NamedTuple):
    """A file that this rank writes: its path inside the checkpoint, the state, and what writes a state."""

    name: str
    state: Any
    write: Callable[[Any, Any], None] = write_object


def _files_of_run(
    run: CheckpointContext, agreement: Agreement, local: Path, *, safe: bool
) -> list[CheckpointFile]:
    """Run the hooks, and wait until those of all ranks have ended; return the files that this rank writes."""
    # 1. Get the full weights, if models are not sharded, and show them to the hooks.
    prepared, states, form = run.prepared, run.strategy.states, run.form
    full = form is StateForm.FULL
    with raising_everywhere(agreement, WHAT):  # hooks may write files of the same names, which are replaced
        weights = [states.full_state_dict(model, keep=run.commits) for model in prepared.models if full]
        for hook in tuple(run.save_hooks.values()):
            hook(run.bare_models, weights, str(local))
    # 2. List what the committer writes for all ranks, this rank's shards, and its own states.
    optimizers = [
        states.full_optimizer_state(optimizer.optimizer, prepared.models, keep=run.commits)
        for optimizer in prepared.optimizers
        if full
    ]
    files: list[CheckpointFile] = []
    if run.commits:
        scaler = run.precision.state_dict()
        files += shared_files(
            weights, optimizers, prepared.schedulers, prepared.dataloaders, scaler, safe=safe
        )

    def add_native(state: Any, path: Path) -> None:
        files.append(CheckpointFile(path.relative_to(local).as_posix(), state))

    for index, model in enumerate(prepared.models):
        if form is StateForm.NATIVE:
            states.save_native(model, local, index, write=add_native)
        elif form is StateForm.SHARDED:
            files += shard_files(run, layout.sharded_model_name(index), model=states.model_tensors(model))
    for index, optimizer in enumerate(prepared.optimizers):
        if form is StateForm.SHARDED:
            state = states.optimizer_tensors(optimizer.optimizer, prepared.models)
            files += shard_files(run, layout.sharded_optimizer_name(index), optimizer=state)
    for index, registered in enumerate(run.custom):
        state = registered.state_dict()  # on every rank: perhaps a collective
        if any(map(is_dtensor, tensors_in(state, set()))):
            raise UnsupportedError(
                f"Registered object {index}, of type {type(registered).__name__}, has sharded tensors in its "
                "state_dict(), and the main process would save its own shards alone. Return full tensors, or "
                "prepare an averaged model with the first one."
            )
        if run.commits:
            files.append(CheckpointFile(layout.custom_name(index), state))
    device, generators = run.runtime.device, run.strategy.generators
    return files + rank_files(prepared.dataloaders, generators, rank=run.rank, device=device)


def shared_files(
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
    write = partial(write_weights, safe=safe)
    files = [CheckpointFile(weights_name(index), dict(state), write) for index, state in enumerate(weights)]
    for index, state in enumerate(optimizers):
        files.append(CheckpointFile(layout.optimizer_name(index), dict(state)))
    for index, scheduler in enumerate(schedulers):
        files.append(CheckpointFile(layout.scheduler_name(index), scheduler.state_dict()))
    for index, loader in enumerate(dataloaders):
        state = loader.torchdata_state() if loader.use_stateful_dataloader else None
        if state:
            files.append(CheckpointFile(layout.loader_state_name(index), state))
    return files + [CheckpointFile(layout.SCALER_NAME, dict(scaler))] * bool(scaler)


def shard_files(run: CheckpointContext, folder: str, **state: Any) -> list[CheckpointFile]:
    """List this rank's two files in a folder of shards: the shards, and their metadata, which is second."""
    writer = sharding.folder.ShardWriter(state, run.rank, run.strategy.states.writer)
    return [
        CheckpointFile(f"{folder}/{shard_file(run.rank)}", writer.local_values(), writer.write_shards),
        CheckpointFile(f"{folder}/{local_metadata_file(run.rank)}", [], writer.write_local_metadata),
    ]


def rank_files(
    dataloaders: Sequence[Any],
    generators: Any = None,
    *,
    rank: int,
    device: torch.device,
    step: int | None = None,
) -> list[CheckpointFile]:
    """List the files that every rank writes: positions of its loaders, and its RNG states with the step."""
    files: list[CheckpointFile] = []
    if dataloaders:
        positions = {"loaders": [loader.state_dict() for loader in dataloaders]}
        files.append(CheckpointFile(layout.position_name(rank), positions))
    states = {key: read() for key, (read, _) in process_generators(device).items()}
    engine = None if generators is None else generators.state_dict()
    if engine:
        states[ENGINE_KEY] = engine
    if step is not None:
        states["step"] = step
    return [*files, CheckpointFile(layout.rng_name(rank), states)]


TORCH_KEY = "torch_manual_seed"
ENGINE_KEY = "engine_random_state"
"""The key of the states of generators that a strategy has of its own."""


def process_generators(device: torch.device) -> dict[str, tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Return what reads and what writes each generator of this process, by its key in a checkpoint."""
    table: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        "random_state": (
            random.getstate,
            lambda state: random.setstate((state[0], tuple(state[1]), state[2])),
        ),
        "numpy_random_seed": (np.random.get_state, np.random.set_state),
        TORCH_KEY: (torch.get_rng_state, torch.set_rng_state),
    }
    # Of the device; on the CPU, of what the program uses besides.
    used = torch.accelerator.current_accelerator() if device.type == "cpu" else device
    module: Any = None if used is None else runtime_module(used) or torch.get_device_module(used)
    if used is not None and (used is device or getattr(module, "is_initialized", bool)()):
        read_all = getattr(module, "get_rng_state_all", None)

        def write(states: Any) -> None:
            if read_all is None:  # mps and xla have one device
                module.set_rng_state(states[0])
                return
            count = module.device_count()
            if len(states) != count:
                logger.warning("There are random states of %d devices, but %d devices.", len(states), count)
            for number, state in zip(range(count), states, strict=False):
                module.set_rng_state(state, number)

        read = read_all or (lambda: [module.get_rng_state()])
        table[f"torch_{used.type}_manual_seed"] = read, write
    return table


@dataclass
class _Job:
    """This rank's share of one save.

    Args:
        agreement: Between the threads that write.
        local: Where this rank writes: `staging`, or a folder from which files are uploaded to it.
        to_disk: Whether everything must be on disk before the checkpoint is committed.
        manifest: The manifest, still without files.
        problem: Why nothing can be written.
    """

    run: CheckpointContext
    agreement: Agreement
    target: AnyPath
    staging: AnyPath
    local: Path
    to_disk: bool
    manifest: Manifest
    files: list[CheckpointFile] = field(default_factory=list[CheckpointFile])
    problem: str = ""

    def clean(self) -> None:
        """Remove what the folders still hold that this rank has made."""
        if self.run.commits or self.local != self.staging:
            remove(self.local)

    def work(self) -> None:
        """Write this rank's files; commit the checkpoint once every rank has written its own.

        Raises:
            CheckpointWriteError: A rank has failed. The checkpoint is removed, and older ones are unchanged.
        """
        try:
            written = {} if self.problem else _write(self)
            # 1. All-gather what was written.
            row = {name: asdict(record) for name, record in written.items()}, self.problem, self.run.committer
            rows = self.agreement.exchange(WHAT, row, public=_for_other_ranks)
            problems = [problem for _, problem, _ in rows if problem]
            # 2. Commit it, or remove it, before another rank may return.
            self.problem = ""
            if self.run.commits and not problems:
                ranks = [rank for rank, (*_, committer) in enumerate(rows) if committer == self.run.rank]
                records = {name: FileRecord(**row) for rank in ranks for name, row in rows[rank][0].items()}
                self.problem = _commit(self, ranks, records | written)
        finally:
            self.files.clear()
            self.clean()
        # 3. Return on every rank when it is committed.
        problems += filter(None, self.agreement.exchange(WHAT, self.problem, last=True))
        if problems:
            if isinstance(self.staging, Path):
                remove(self.staging)  # of a host that does not share the committer's folder
            raise CheckpointWriteError(
                f"There is no new checkpoint at {str(self.target)!r}: {'; '.join(problems)}. "
                "Older ones are unchanged."
            )


def _for_other_ranks(rows: list[Any]) -> list[Any]:
    """Return what was written without the records of files: another host's committer reads its own folder."""
    return [[{}, *rest] for _, *rest in rows]


def _write(job: _Job) -> dict[str, FileRecord]:
    """Write this rank's files; return their records, and note the error, which goes to all ranks."""
    files: dict[str, FileRecord] = {}
    name = str(job.staging)
    store = job.staging if isinstance(job.staging, RemotePath) else None
    try:
        for name, state, write in job.files:
            make_folder((job.local / name).parent)
            files[name] = write_file(job.local / name, partial(write, state), to_disk=False)
        if store is None and job.to_disk:
            with ThreadPoolExecutor(_FLUSHES, "accel-flush") as threads:
                list(threads.map(flush_file, [job.local / name for name in files]))
        if store is not None:
            for name in sizes_in(job.local):  # with those of hooks
                path = job.local / name
                if name in files or job.run.commits or not layout.is_of_checkpoint(path.name):
                    files.setdefault(name, record_of(path))
                    (store / name).upload(path)
    except Exception as error:
        logger.debug("%s", name, exc_info=error)
        job.problem = _describe_error(job, name, error)
    return files


_FLUSHES = 8  # files that are flushed at the same time


def _commit(job: _Job, ranks: Sequence[int], files: dict[str, FileRecord]) -> str:
    """Commit the checkpoint with the files that some ranks have written; return the problem, if any."""
    try:
        # A listing of a store may be late, and has files of an interrupted upload.
        found = files if isinstance(job.staging, RemotePath) else sizes_in(job.staging)
        if absent := sorted(files.keys() - found.keys()):
            return (
                f"rank {job.run.rank} cannot find {absent[0]!r}, which another rank wrote to "
                f"{str(job.staging)!r}: the hosts do not share this folder."
                f" Choose a folder that they share, or "
                "pass ProjectConfiguration(save_on_each_node=True)"
            )
        unhashed = found.keys() - files.keys()  # those of hooks, and of other ranks of this host
        end = f"/{local_metadata_file(job.run.rank)}"
        for name in [name.removesuffix(end) for name in files if name.endswith(end)]:  # folders of shards
            unhashed.add(f"{name}/{INDEX_NAME}")
            for replaced in sharding.folder.write_index(job.staging / name, ranks):
                del files[f"{name}/{replaced}"]
        for name in sorted(unhashed):
            files[name] = record_of(job.staging / name, to_disk=job.to_disk)
        folder.commit(job.staging, job.target, replace(job.manifest, files=files), to_disk=job.to_disk)
    except (OSError, CheckpointError) as error:
        return _describe_error(job, str(getattr(error, "filename", None) or job.target), error)
    _prune(job)
    return ""


def _prune(job: _Job) -> None:
    """Delete the numbered checkpoints above the limit; a failure is only logged."""
    newest, limit = job.manifest.iteration, job.run.project.total_limit
    if newest is None or limit is None:
        return
    project = job.target.parent
    try:
        older = sorted({*folder.list_complete(project)} - {newest})
        for iteration in older[: max(0, len(older) + 1 - max(1, limit))]:
            folder.delete(project / layout.numbered_name(iteration))
    except OSError as error:
        logger.warning("Older checkpoints could not be deleted from %s: %s", project, error)


def _describe_error(job: _Job, name: str, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{error!r}"
    return f"rank {job.run.rank} could not write {name!r}: {reason}"


class Saving:
    """A checkpoint that is being written, or was.

    Args:
        path: The folder of the checkpoint, once it is committed.
        work: Writes and commits it.
    """

    def __init__(self, path: str, work: Callable[[], None] | None = None) -> None:
        self.path = path
        self._work = work
        self._error: BaseException | None = None
        self._raised = False
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error: `wait` returns or raises at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str:
        """Block until the checkpoint is committed.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointWriteError: It could not be written.
        """
        if self._thread is not None:
            self._thread.join()
        self._raised = True
        if self._error is not None:
            raise self._error
        return self.path

    def start(self) -> None:
        """Start the writer thread; called once."""
        # No daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name=_THREAD)
        # If nothing referred to it, its server would end when a script destroys the process group.
        self._store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        self._thread.start()

    def finish(self) -> None:
        """Wait until the save has ended; raise its error unless `wait` has raised it."""
        if not self._raised:
            self.wait()

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"Saving({self.path!r}, done={self.done})"

    def _run(self) -> None:
        work, self._work = self._work, None  # it refers to the run, and so to its models
        try:
            if work is not None:
                work()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it, whatever it is
            self._error = error
            logger.error("%s", error)
        self._store = None


_THREAD = "accel-checkpoint"


def _join_running() -> None:
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join()


# At its end the interpreter forbids new work in thread pools, which uploads need, and then waits for threads.
# `concurrent.futures` registers itself in the same list, whose last entry is called first.
_register: Any = vars(threading)["_register_atexit"]
_register(_join_running)
