"""Save a checkpoint: agree on a staging folder, write every rank's files, commit them together.

Files are written at once, or copied to host memory and written by a thread.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_plugins import sharding
from accel_plugins.sharding.state import INDEX_NAME, StateForm
from accel_state.errors import (
    CheckpointError,
    CheckpointWriteError,
    DistributedOperationException,
    SettingsError,
)
from accel_state.files import any_path
from accel_state.frozen import frozen
from accel_state.remote import AnyPath, RemotePath
from accel_train.checkpoint import folder, layout
from accel_train.checkpoint.agreement import AbsentRankError, Agreement, SingleProcess
from accel_train.checkpoint.contents import (
    CheckpointFile,
    Contents,
    check_remote,
    check_shared,
    copy_file,
    folders_of,
    form_of_run,
    native_parts,
    rank_files,
    sharded_parts,
    shared_parts,
)
from accel_train.checkpoint.context import CheckpointContext
from accel_train.checkpoint.files import make_folder, record_of, remove, sizes_in, write_file
from accel_train.checkpoint.folder import commit, delete, list_complete, to_prune
from accel_train.checkpoint.layout import FileRecord, Manifest
from accel_train.checkpoint.staging import HostStaging

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
    check_shared(run)
    target = target_of(run, output_dir)
    if run.strategy.replicas is not None and not run.strategy.replicas.is_saver:
        run.project.iteration += run.is_automatic
        return _started(Saving(str(target), _save_nothing))
    if isinstance(target, RemotePath):
        check_remote(run, target)
    request = SaveRequest(
        folder=str(target),
        iteration=run.project.iteration if run.is_automatic else None,
        safe=safe,
        blocking=blocking,
        to_disk=to_disk,
    )
    main, agreement = run.main, run.background
    try:
        path, has_hooks = _agree(run, request, target, main)
    except AbsentRankError as error:
        if run.rank > 0:
            run.project.iteration += run.is_automatic
            logger.warning("%s, which has saved without its random states.", error)
            return _started(Saving(str(target), _save_nothing))
        logger.warning(
            "save_state() was called only on rank 0. It waits to detect this and saves only its own "
            "state: the random states of other ranks are not in the checkpoint. Call it on every rank."
            " (%s)",
            error,
        )
        main = agreement = SingleProcess()
        path, has_hooks = _agree(run, request, target, main)
    try:
        task = _write_task(run, request, target, path, world_size=agreement.world_size)
        return _save(run, request, task, agreement, hooks_end=main if has_hooks else SingleProcess())
    except BaseException:
        discard(path if run.commits else None)
        raise


def discard(staging: AnyPath | None) -> None:
    """Remove a staging folder; the next save replaces what was uploaded to a store."""
    if isinstance(staging, Path):
        remove(staging)


@frozen
class SaveRequest:
    """The arguments of a save; the same on all ranks."""

    folder: str
    iteration: int | None
    safe: bool
    blocking: bool
    to_disk: bool


@frozen
class SaveProposal:
    """One rank's view of the save before anything is written.

    Args:
        request: The arguments of the call.
        staging: The staging folder, on ranks that commit.
        problem: Why there is no staging folder.
        exists: Whether the problem is that the numbered checkpoint exists already.
        has_hooks: Whether this rank calls hooks before it writes.
    """

    request: SaveRequest
    staging: str = ""
    problem: str = ""
    exists: bool = False
    has_hooks: bool = False


def target_of(run: CheckpointContext, output_dir: str | os.PathLike[str] | None) -> AnyPath:
    """Return the folder of the next checkpoint."""
    if run.is_automatic:
        target = run.numbered / layout.numbered_name(run.project.iteration)
        if output_dir is not None:
            logger.warning(
                "save_state(%r): with automatic_checkpoint_naming, this checkpoint goes to %s.",
                str(output_dir),
                target,
            )
        return target
    if output_dir is None:
        raise SettingsError(
            "save_state() needs an output_dir, unless the Accelerator has a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    return any_path(output_dir, "save_state(output_dir)")


def _agree(
    run: CheckpointContext, request: SaveRequest, target: AnyPath, agreement: Agreement
) -> tuple[AnyPath, bool]:
    """Agree with all ranks on the request; return the path to write to, and whether any rank has hooks."""
    staging, proposal = (
        _make_staging(request, target) if run.commits else (None, SaveProposal(request=request))
    )
    proposal = replace(proposal, has_hooks=bool(run.save_hooks))
    if run.project.save_on_each_node:  # hosts that share no file system may have folders of other names
        proposal = replace(proposal, request=replace(request, folder=""))
    # Rank 0 may save alone what it has in full.
    alone = asdict(proposal.request) if not run.strategy.states.is_sharded else None
    try:
        rows = agreement.exchange(WHAT, asdict(proposal), alone=alone)
        proposals = [SaveProposal(**(row | {"request": SaveRequest(**row["request"])})) for row in rows]
        if any(proposal.request != proposals[0].request for proposal in proposals):
            raise DistributedOperationException(
                "save_state() was called with different arguments: "
                + "; ".join(f"rank {rank}: {proposal.request}" for rank, proposal in enumerate(proposals))
            )
        for rank, proposal in enumerate(proposals):
            if proposal.problem:
                kind = SettingsError if proposal.exists else CheckpointWriteError
                raise kind(f"rank {rank}: {proposal.problem}")
    except BaseException:
        discard(staging)
        raise
    path = any_path(proposals[run.committer].staging, "the staging folder")
    return path, any(proposal.has_hooks for proposal in proposals)


def _make_staging(request: SaveRequest, target: AnyPath) -> tuple[AnyPath | None, SaveProposal]:
    """Make the staging folder; return it, and what this rank proposes."""
    try:
        existing = _refuse_existing(request, target)
        if existing is not None:
            return None, existing
        staging = folder.make_staging(target)
    except (OSError, CheckpointError) as error:
        name = getattr(error, "filename", None) or target
        reason = getattr(error, "strerror", None) or str(error)
        return None, SaveProposal(request=request, problem=f"{str(name)!r} could not be created: {reason}")
    return staging, SaveProposal(request=request, staging=str(staging))


def _refuse_existing(request: SaveRequest, target: AnyPath) -> SaveProposal | None:
    """Refuse a number that is not the largest: the newest checkpoint would be the first to be pruned."""
    numbers = [] if request.iteration is None else folder.numbers(target.parent, since=request.iteration)
    if not numbers:
        return None
    newest = target.parent / layout.numbered_name(numbers[-1])
    problem = (
        f"{str(newest)!r} already exists from an earlier run. Resume from it with load_state(), or set "
        f"ProjectConfiguration(iteration={numbers[-1] + 1})."
    )
    return SaveProposal(request=request, problem=problem, exists=True)


def _write_task(
    run: CheckpointContext,
    request: SaveRequest,
    target: AnyPath,
    path: AnyPath,
    *,
    world_size: int,
) -> WriteTask:
    step = run.synchronizer.step
    if step:
        logger.warning(
            "The state is saved %d micro-batch(es) after the last optimizer step; their gradients are not "
            "part of it. Save `if accelerator.sync_gradients:`.",
            step,
        )
    return WriteTask(
        target=target,
        staging=path,
        rank=run.rank,
        committer=run.committer,
        limit=run.project.total_limit,
        to_disk=request.to_disk,
        manifest=Manifest(world_size=world_size, step=step, iteration=request.iteration),
        folders=tuple(folders_of(run)),
        hook_folder=path if isinstance(path, Path) else Path(tempfile.mkdtemp(prefix="accel-hooks-")),
    )


def _parts(
    run: CheckpointContext, job: WriteTask, *, safe: bool, hooks_end: Agreement
) -> list[CheckpointFile]:
    """Run the hooks, and wait until those of all ranks have ended; return the files that this rank writes."""
    # 1. Get the full weights, if models are not sharded, and show them to the hooks.
    prepared, form = run.prepared, form_of_run(run)
    full = form is StateForm.FULL
    weights = [
        run.strategy.states.full_state_dict(model, keep=run.commits) for model in prepared.models if full
    ]
    failure: Exception | None = None
    try:
        for hook in tuple(run.save_hooks.values()):
            hook(run.bare_models, weights, str(job.hook_folder))
    except Exception as error:  # noqa: BLE001 - raised below: other ranks wait in the collectives that follow
        failure = error
    hooks_end.exchange(WHAT, None)  # they may write files of the same names, which are then replaced
    # 2. Collect the state of all other objects.
    contents = Contents(
        weights=weights,
        optimizers=[
            run.strategy.states.full_optimizer_state(optimizer.optimizer, prepared.models, keep=run.commits)
            for optimizer in prepared.optimizers
            if full
        ],
        schedulers=prepared.schedulers,
        dataloaders=prepared.dataloaders,
        scaler=run.precision.state_dict(),
        generators=run.strategy.generators,
    )
    # 3. List what the committer writes for all ranks, this rank's shards, and its own states.
    shared = shared_parts(contents, safe=safe) if run.commits else []
    if form is StateForm.SHARDED:
        shared += sharded_parts(run)
    elif form is StateForm.NATIVE:
        shared += native_parts(run, job.hook_folder)
    states = [registered.state_dict() for registered in run.custom]  # on every rank: perhaps a collective
    shared += [
        CheckpointFile(name=layout.custom_name(index), read=lambda state=state: state)
        for index, state in enumerate(states)
        if run.commits
    ]
    if job.hook_folder != job.staging:
        own = {part.name for part in shared}
        shared += [
            CheckpointFile(
                name=path.relative_to(job.hook_folder).as_posix(), read=partial(str, path), write=copy_file
            )
            for path in sorted(job.hook_folder.rglob("*"))
            if path.is_file()
            and path.relative_to(job.hook_folder).as_posix() not in own
            and (run.commits or not layout.is_of_checkpoint(path.name))
        ]
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # else a cycle: its traceback holds this frame
    return [*shared, *rank_files(contents, rank=job.rank, device=run.runtime.device)]


def _save(
    run: CheckpointContext,
    request: SaveRequest,
    job: WriteTask,
    agreement: Agreement,
    *,
    hooks_end: Agreement,
) -> Saving:
    """Write the files of this rank, or start the writer thread."""
    if request.iteration is not None:
        run.project.iteration = request.iteration + 1
    parts: list[CheckpointFile] = []

    def work() -> None:
        try:
            commit_when_written(job, write_parts(job, parts), agreement)
        finally:
            parts.clear()
            if job.rank == job.committer:
                discard(job.staging)

    # 1. Write the files, or copy their states to host memory.
    saving = Saving(str(job.target), work)
    report, failure = WriteResult(job.committer), None
    try:
        parts += _parts(run, job, safe=request.safe, hooks_end=hooks_end)
        if request.blocking:
            report = write_parts(job, parts)
        else:
            parts[:] = staged_parts(parts, run.staging)
    except Exception as error:  # noqa: BLE001 - hooks and state dicts are users' code, and all ranks need the error
        failure = error
        report.error = f"rank {job.rank} failed before writing: {error!r}"
    # 2. Let the thread write and commit them, or commit what was written.
    if failure is None and not request.blocking:
        run.saving = saving
        saving.start()
        return saving
    try:
        commit_when_written(job, report, agreement)
    except CheckpointWriteError as error:
        raise error from failure
    finally:
        del failure  # else a cycle: its traceback holds this frame
    logger.info("Saved the state to %s.", job.target)
    return saving


@frozen
class WriteTask:
    """This rank's share of one save.

    Args:
        committer: The rank that commits the folder in which this rank writes.
        limit: The largest number of numbered checkpoints to keep; all if `None`.
        to_disk: Whether everything must be on disk before the checkpoint is committed.
        manifest: The manifest, still without files.
        folders: The folders to which all ranks write; each needs an index.
        hook_folder: Where hooks write: `staging`, or a folder of this machine where that is on a store.
    """

    target: AnyPath
    staging: AnyPath
    hook_folder: Path
    rank: int
    committer: int
    limit: int | None
    to_disk: bool
    manifest: Manifest
    folders: tuple[str, ...] = ()


@dataclass(slots=True)
class WriteResult:
    """The files that a rank has written, or the error that it met."""

    committer: int
    files: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    error: str | None = None

    @classmethod
    def from_dict(cls, report: dict[str, Any]) -> WriteResult:
        """Read what `asdict` wrote."""
        files = {name: FileRecord(**record) for name, record in report["files"].items()}
        return cls(report["committer"], files, report["error"])


def write_parts(job: WriteTask, parts: Sequence[CheckpointFile]) -> WriteResult:
    """Write this rank's files.

    Returns:
        What was written. An error is a part of it, so that all ranks get it.
    """
    report = WriteResult(job.committer)
    name = str(job.staging)
    try:
        for part in parts:
            name = part.name
            path = job.staging / name
            if isinstance(path, Path):
                make_folder(path.parent)
                report.files[name] = write_file(path, part.write_to, to_disk=job.to_disk)
            else:
                with tempfile.TemporaryDirectory(prefix="accel-upload-") as folder:
                    local = Path(folder) / path.name
                    report.files[name] = write_file(local, part.write_to, to_disk=False)
                    path.upload(local)
    except Exception as error:
        report.error = _describe_error(job.rank, name, error)
        logger.debug("%s", report.error, exc_info=error)
    return report


def staged_parts(parts: Sequence[CheckpointFile], staging: HostStaging) -> list[CheckpointFile]:
    """Copy the states of this rank's files to host memory."""
    staging.reset()
    copies = [staging.copy(part.read()) for part in parts]
    staging.synchronize()
    return [replace(part, read=lambda state=state: state) for part, state in zip(parts, copies, strict=True)]


def commit_when_written(job: WriteTask, report: WriteResult, agreement: Agreement) -> None:
    """Commit the checkpoint once every rank has written its files.

    Raises:
        CheckpointWriteError: A rank has failed. The checkpoint is removed, and older ones are unchanged.
    """
    # 1. All-gather what was written.
    if job.hook_folder != job.staging:
        remove(job.hook_folder)
    reports = [WriteResult.from_dict(row) for row in agreement.exchange(WHAT, asdict(report))]
    errors = [report.error for report in reports if report.error is not None]
    # 2. Commit it, or remove it.
    problem = ""
    if job.rank == job.committer and not errors:
        problem = _commit(
            job, {rank: report for rank, report in enumerate(reports) if report.committer == job.rank}
        )
    if job.rank == job.committer:
        discard(job.staging)  # before another rank may return
    # 3. Return on every rank when it is committed.
    errors += filter(None, agreement.exchange(WHAT, problem, last=True))
    if errors:
        discard(job.staging)  # of a host that does not share the committer's folder
        raise CheckpointWriteError(
            f"There is no new checkpoint at {str(job.target)!r}: {'; '.join(errors)}. "
            "Older ones are unchanged."
        )


def _commit(job: WriteTask, reports: Mapping[int, WriteResult]) -> str:
    """Commit the checkpoint; return the problem, if any."""
    try:
        files = {name: record for report in reports.values() for name, record in report.files.items()}
        is_remote = isinstance(job.staging, RemotePath)
        absent = [] if is_remote else sorted(set(files) - set(sizes_in(job.staging)))
        if absent:
            return (
                f"rank {job.rank} cannot find {absent[0]!r}, which another rank wrote to "
                f"{str(job.staging)!r}: the hosts do not share this folder."
                f" Choose a folder that they share, or "
                "pass ProjectConfiguration(save_on_each_node=True)"
            )
        unhashed: set[str] = set()
        for folder in job.folders:
            unhashed.add(f"{folder}/{INDEX_NAME}")
            for name in sharding.folder.write_index(job.staging / folder, reports):
                del files[f"{folder}/{name}"]
        if not is_remote:  # a listing of a store may be late, and has files of an interrupted upload
            unhashed = set(sizes_in(job.staging)) - set(files)  # those of hooks, too
        for name in sorted(unhashed):
            files[name] = record_of(job.staging / name, to_disk=job.to_disk)
        commit(job.staging, job.target, replace(job.manifest, files=files), to_disk=job.to_disk)
    except (OSError, CheckpointError) as error:
        return _describe_error(job.rank, str(getattr(error, "filename", None) or job.target), error)
    _prune(job)
    return ""


def _prune(job: WriteTask) -> None:
    """Delete the numbered checkpoints above the limit; a failure is only logged."""
    newest = job.manifest.iteration
    if newest is None or job.limit is None:
        return
    project = job.target.parent
    try:
        complete = list_complete(project)
    except OSError as error:
        logger.warning("No older checkpoints were deleted, since %s cannot be listed: %s", project, error)
        return
    for iteration in to_prune(complete, newest=newest, limit=job.limit):
        try:
            delete(project / layout.numbered_name(iteration))
        except OSError as error:
            logger.warning("checkpoint_%d could not be deleted: %s", iteration, error)


def _describe_error(rank: int, name: str, error: Exception) -> str:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{error!r}"
    return f"rank {rank} could not write {name!r}: {reason}"


class Saving:
    """A checkpoint that is being written, or was.

    Args:
        path: The folder of the checkpoint, once it is committed.
        work: Writes and commits it.
    """

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self._path = path
        self._work = work
        self._error: BaseException | None = None
        self._raised = False
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> str:
        """The folder of the checkpoint, once it is committed."""
        return self._path

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error: `wait` returns or raises at once."""
        return self._thread is not None and not self._thread.is_alive()

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
        return self._path

    def start(self) -> None:
        """Start the writer thread; called once."""
        # No daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name="accel-checkpoint")
        _running[self._thread] = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
        self._thread.start()

    def finish(self) -> None:
        """Wait until the save has ended; raise its error unless `wait` has raised it."""
        if not self._raised:
            self.wait()

    def __fspath__(self) -> str:
        return self._path

    def __repr__(self) -> str:
        return f"Saving({self._path!r}, done={self.done})"

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it, whatever it is
            self._error = error
            logger.error("%s", error)
        del _running[threading.current_thread()]


def _save_nothing() -> None:
    """Write nothing: another replica group or rank 0 has the same state, and saves it."""


def _started(saving: Saving) -> Saving:
    saving.start()
    return saving


# The writer threads, and the store that they exchange values through: if nothing referred to it, its server
# would end when a script destroys the process group.
_running: dict[threading.Thread, Any] = {}


def _join_running() -> None:
    for thread in [*_running]:
        thread.join()


# At its end the interpreter forbids new work in thread pools, which uploads need, and then waits for threads.
# `concurrent.futures` registers itself in the same list, whose last entry is called first.
_register: Any = vars(threading)["_register_atexit"]
_register(_join_running)
