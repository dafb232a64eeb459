"""Save: steps, writer, commit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accel_plugins import sharding
from accel_plugins.sharding.state import StateForm
from accel_state.errors import (
    CheckpointError,
    CheckpointWriteError,
    DistributedOperationException,
    SettingsError,
)
from accel_state.files import local_path
from accel_train.checkpoint import folder, layout
from accel_train.checkpoint.agreement import Agreement
from accel_train.checkpoint.contents import (
    CheckpointContext,
    CheckpointFile,
    Contents,
    check_shared,
    folders_of,
    form_of_run,
    native_parts,
    rank_files,
    sharded_parts,
    shared_parts,
)
from accel_train.checkpoint.files import FolderLock, make_folder, record_of, remove, sizes_in, write_file
from accel_train.checkpoint.folder import Staging, commit, delete, list_complete, to_prune
from accel_train.checkpoint.layout import FileRecord, Manifest
from accel_train.checkpoint.staging import HostStaging

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTask:
    """What is to be done for one checkpoint, on this rank.

    Args:
        committer: The rank that completes the folder in which this one writes.
        limit: How many numbered checkpoints are kept; all if `None`.
        to_disk: Whether everything is to be on disk before the checkpoint counts.
        manifest: Without files.
        folders: Those to which all ranks write, and that need an index.
        lock: Of the committer, keeps other writers away until the checkpoint is complete.
    """

    target: Path
    staging: Path
    rank: int
    committer: int
    limit: int | None
    to_disk: bool
    manifest: Manifest
    folders: tuple[str, ...] = ()
    lock: FolderLock | None = None


@dataclass(slots=True)
class WriteResult:
    """What a rank has done."""

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
        What was written; an error is part of it, for all ranks must hear of it.
    """
    report = WriteResult(job.committer)
    for part in parts:
        try:
            path = job.staging / part.name
            make_folder(path.parent)
            report.files[part.name] = write_file(path, part.write_to, to_disk=job.to_disk)
        except Exception as error:
            report.error = _describe_error(job.rank, part.name, error)
            logger.debug("%s", report.error, exc_info=error)
            break
    return report


def staged_parts(parts: Sequence[CheckpointFile], staging: HostStaging) -> list[CheckpointFile]:
    """Copy the states of this rank's files to host memory."""
    staging.reset()
    copies = [staging.copy(part.read()) for part in parts]
    staging.synchronize()
    return [replace(part, read=lambda state=state: state) for part, state in zip(parts, copies, strict=True)]


def commit_when_written(job: WriteTask, report: WriteResult, agreement: Agreement) -> None:
    """Make the checkpoint stand if all ranks have written their files, on all ranks.

    Raises:
        CheckpointWriteError: A rank has failed. There is nothing left of the checkpoint; older ones stand.
    """
    what = "save_state()"
    reports = [WriteResult.from_dict(one) for one in agreement.exchange(what, asdict(report))]
    errors = [report.error for report in reports if report.error is not None]
    commits = job.rank == job.committer
    problem = ""
    if commits and not errors:
        own = {rank: other for rank, other in enumerate(reports) if other.committer == job.rank}
        problem = _commit(job, own)
    if commits and (errors or problem):
        remove(job.staging)
    if job.lock is not None:
        job.lock.release()  # before another rank may return
    errors += filter(None, agreement.exchange(what, problem, last=True))
    if errors:
        raise CheckpointWriteError(
            f"There is no new checkpoint at {str(job.target)!r}: {'; '.join(errors)}. Older ones stand."
        )


def _commit(job: WriteTask, reports: Mapping[int, WriteResult]) -> str:
    """Put the checkpoint in its place; return what went wrong."""
    try:
        files = {name: record for report in reports.values() for name, record in report.files.items()}
        sizes = sizes_in(job.staging)
        absent = sorted(set(files) - set(sizes))
        if absent:
            return (
                f"rank {job.rank} does not see {absent[0]!r}, which another rank has written to "
                f"{str(job.staging)!r}: hosts do not share this folder. Choose a folder that they share, or "
                "pass ProjectConfiguration(save_on_each_node=True)"
            )
        for folder in job.folders:
            for note in sharding.folder.write_index(job.staging / folder, reports):
                del files[f"{folder}/{note}"]
        sizes = sizes_in(job.staging)
        for name in sorted(set(sizes) - set(files)):  # hooks have written these, or the lines above
            files[name] = record_of(job.staging / name, to_disk=job.to_disk)
        manifest = Manifest(
            world_size=job.manifest.world_size,
            step=job.manifest.step,
            iteration=job.manifest.iteration,
            files=files,
        )
        commit(job.staging, job.target, manifest, to_disk=job.to_disk)
    except (OSError, CheckpointError) as error:
        return _describe_error(job.rank, str(getattr(error, "filename", None) or job.target), error)
    _prune(job)
    return ""


def _prune(job: WriteTask) -> None:
    newest = job.manifest.iteration
    if newest is None or job.limit is None:
        return
    project = job.target.parent
    for iteration in to_prune(list_complete(project), newest=newest, limit=job.limit):
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
        path: Where it stands when it is complete.
        work: Writes it.
    """

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self._path = path
        self._work = work
        self._error: BaseException | None = None
        self._raised = False
        # No daemon: the interpreter waits for it before it ends.
        self._thread = threading.Thread(target=self._run, name="accel-checkpoint")

    @property
    def path(self) -> str:
        """Where the checkpoint stands when it is complete."""
        return self._path

    @property
    def done(self) -> bool:
        """Whether nothing is left to do, well or ill; `wait` then returns, or raises, at once."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def wait(self) -> str:
        """Return when the checkpoint stands, on every rank.

        Returns:
            Where.

        Raises:
            CheckpointWriteError: It could not be written.
        """
        self._thread.join()
        self._raised = True
        if self._error is not None:
            raise self._error
        return self._path

    def start(self) -> None:
        """Start the writer thread; called once."""
        self._thread.start()

    def finish(self) -> None:
        """Wait until the save has ended; raise its error unless `wait` has raised it."""
        if self._raised:
            self._thread.join()
        else:
            self.wait()

    def __fspath__(self) -> str:
        return self._path

    def __repr__(self) -> str:
        return f"Saving({self._path!r}, done={self.done})"

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - belongs to the main thread, whatever it is
            self._error = error
            logger.error("%s", error)


WHAT = "save_state()"


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The arguments of a save; the same on all ranks."""

    folder: str
    iteration: int | None
    safe: bool
    blocking: bool
    to_disk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveProposal:
    """The answer of a rank before anything is written.

    Args:
        request: What it was asked.
        staging: The folder that it has made to be written in, if that is its part.
        problem: Why there is none.
        exists: Whether that is because the numbered checkpoint is there already.
    """

    request: SaveRequest
    staging: str = ""
    problem: str = ""
    exists: bool = False


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
    request = SaveRequest(
        folder=str(target),
        iteration=run.project.iteration if run.is_automatic else None,
        safe=safe,
        blocking=blocking,
        to_disk=to_disk,
    )
    staging, mine = _agree(run, request, target)
    try:
        lock = None if mine is None else mine.lock
        return _save(run, request, replace(_job(run, request, target, staging), lock=lock))
    except BaseException:
        if mine is not None:
            mine.discard()
        raise


def _save(run: CheckpointContext, request: SaveRequest, job: WriteTask) -> Saving:
    """Write, or start the writer thread."""
    if request.iteration is not None:
        run.project.iteration = request.iteration + 1
    parts: list[CheckpointFile] = []

    def work() -> None:
        try:
            commit_when_written(job, write_parts(job, parts), run.background)
        finally:
            if job.lock is not None:
                job.lock.release()

    saving = Saving(str(job.target), work)
    report, failure = WriteResult(job.committer), None
    try:
        parts += _parts(run, job, safe=request.safe)
        if request.blocking:
            report = write_parts(job, parts)
        else:
            parts[:] = staged_parts(parts, run.staging)
    except Exception as error:  # noqa: BLE001 - hooks and state dicts are users' code, and all ranks must hear
        failure = error
        report.error = f"rank {job.rank} failed before it could write: {error!r}"
    if failure is None and not request.blocking:
        run.saving = saving
        saving.start()
        return saving
    try:
        commit_when_written(job, report, run.background)
    except CheckpointWriteError as error:
        raise error from failure
    logger.info("Saved the state to %s.", job.target)
    return saving


def target_of(run: CheckpointContext, output_dir: str | os.PathLike[str] | None) -> Path:
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
    return local_path(output_dir, "save_state(output_dir)")


def _agree(run: CheckpointContext, request: SaveRequest, target: Path) -> tuple[Path, Staging | None]:
    """Agree with all ranks on the request; return the staging folder and what to release."""
    # Hosts that share no file system may well save to folders of different names.
    common = replace(request, folder="") if run.project.save_on_each_node else request
    begun, mine = _begin(request, target) if run.commits else (None, SaveProposal(request=request))
    mine = replace(mine, request=common)
    try:
        rows = run.main.exchange(WHAT, asdict(mine))
        answers = [SaveProposal(**(row | {"request": SaveRequest(**row["request"])})) for row in rows]
        if any(answer.request != answers[0].request for answer in answers):
            raise DistributedOperationException(
                "save_state() was called with different arguments: "
                + "; ".join(f"rank {rank}: {answer.request}" for rank, answer in enumerate(answers))
            )
        for rank, answer in enumerate(answers):
            if answer.problem:
                kind = SettingsError if answer.exists else CheckpointWriteError
                raise kind(f"rank {rank}: {answer.problem}")
    except BaseException:
        if begun is not None:
            begun.discard()
        raise
    return Path(answers[run.committer].staging), begun


def _begin(request: SaveRequest, target: Path) -> tuple[Staging | None, SaveProposal]:
    """Make the staging folder."""
    if request.iteration is not None and target.exists():
        return None, _reserve(request, target)
    try:
        begun = folder.make_staging(target)
    except CheckpointWriteError as error:
        return None, SaveProposal(request=request, problem=str(error))
    except (OSError, CheckpointError) as error:
        name = getattr(error, "filename", None) or target
        reason = getattr(error, "strerror", None) or str(error)
        return None, SaveProposal(request=request, problem=f"{str(name)!r} could not be made: {reason}")
    if request.iteration is not None and target.exists():  # another job was faster
        begun.discard()
        return None, _reserve(request, target)
    return begun, SaveProposal(request=request, staging=str(begun.path))


def _reserve(request: SaveRequest, target: Path) -> SaveProposal:
    number = max(folder.numbers(target.parent)) + 1
    problem = (
        f"{str(target)!r} is there already, of an earlier run. Go on from it with load_state(), or set "
        f"ProjectConfiguration(iteration={number})."
    )
    return SaveProposal(request=request, problem=problem, exists=True)


def _job(run: CheckpointContext, request: SaveRequest, target: Path, staging: Path) -> WriteTask:
    step = run.synchronizer.step
    if step:
        logger.warning(
            "The state is saved %d micro-batch(es) after the last optimizer step; their gradients are not "
            "part of it. Save `if accelerator.sync_gradients:`.",
            step,
        )
    world_size = run.runtime.topology.world_size
    return WriteTask(
        target=target,
        staging=staging,
        rank=run.rank,
        committer=run.committer,
        limit=run.project.total_limit,
        to_disk=request.to_disk,
        manifest=Manifest(world_size=world_size, step=step, iteration=request.iteration),
        folders=tuple(folders_of(run)),
    )


def _parts(run: CheckpointContext, job: WriteTask, *, safe: bool) -> list[CheckpointFile]:
    """Run the hooks; return the files that this rank writes."""
    prepared, form = run.prepared, form_of_run(run)
    full = form is StateForm.FULL
    weights = [
        run.strategy.persister.full_state_dict(model, keep=run.commits) for model in prepared.models if full
    ]
    for hook in tuple(run.save_hooks.values()):
        hook(run.bare_models, weights, str(job.staging))
    contents = Contents(
        weights=weights,
        optimizers=[
            run.strategy.persister.full_optimizer_state(one.optimizer, prepared.models, keep=run.commits)
            for one in prepared.optimizers
            if full
        ],
        schedulers=prepared.schedulers,
        dataloaders=prepared.dataloaders,
        custom=run.custom,
        scaler=run.precision.state_dict(),
        recipe=run.recipe_state(),
        generators=run.strategy.generators,
    )
    shared = shared_parts(contents, safe=safe) if run.commits else []
    if form is StateForm.SHARDED:
        shared += sharded_parts(run)
    elif form is StateForm.NATIVE:
        shared += native_parts(run, job.staging)
    return [*shared, *rank_files(contents, rank=job.rank, device=run.runtime.device)]
