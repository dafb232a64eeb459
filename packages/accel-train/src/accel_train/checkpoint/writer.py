"""The writing of one checkpoint: this rank's files, then, when all ranks are done, the step that counts."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from accel_plugins import dcp
from accel_state.errors import CheckpointError, CheckpointWriteError
from accel_train.checkpoint import layout
from accel_train.checkpoint.contents import Part
from accel_train.checkpoint.files import make_folder, record_of, remove, sizes_in, write_file
from accel_train.checkpoint.folder import complete_ones, delete, outdated, publish
from accel_train.checkpoint.manifest import FileRecord, Manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from accel_train.checkpoint.lock import FolderLock
    from accel_train.checkpoint.staging import HostStaging
    from accel_train.checkpoint.store_gather import Agreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
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
class Report:
    """What a rank has done."""

    committer: int
    files: dict[str, FileRecord] = field(default_factory=dict[str, FileRecord])
    error: str | None = None

    @classmethod
    def from_dict(cls, report: dict[str, Any]) -> Report:
        """Read what `asdict` wrote."""
        files = {name: FileRecord(**record) for name, record in report["files"].items()}
        return cls(report["committer"], files, report["error"])


def write_parts(job: Job, parts: Sequence[Part]) -> Report:
    """Write this rank's files.

    Returns:
        What was written; an error is part of it, for all ranks must hear of it.
    """
    report = Report(job.committer)
    for part in parts:
        try:
            path = job.staging / part.name
            make_folder(path.parent)
            report.files[part.name] = write_file(path, part.write_to, to_disk=job.to_disk)
        except Exception as error:
            report.error = _story(job.rank, part.name, error)
            logger.debug("%s", report.error, exc_info=error)
            break
    return report


def staged_parts(parts: Sequence[Part], staging: HostStaging) -> list[Part]:
    """Copy the states of this rank's files to host memory."""
    staging.reset()
    copies = [staging.copy(part.read()) for part in parts]
    staging.synchronize()
    return [replace(part, read=lambda state=state: state) for part, state in zip(parts, copies, strict=True)]


def complete(job: Job, report: Report, agreement: Agreement) -> None:
    """Make the checkpoint stand if all ranks have written their files, on all ranks.

    Raises:
        CheckpointWriteError: A rank has failed. There is nothing left of the checkpoint; older ones stand.
    """
    what = "save_state()"
    reports = [Report.from_dict(one) for one in agreement.exchange(what, asdict(report))]
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


def _commit(job: Job, reports: Mapping[int, Report]) -> str:
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
            for note in dcp.write_index(job.staging / folder, reports):
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
        publish(job.staging, job.target, manifest, to_disk=job.to_disk)
    except (OSError, CheckpointError) as error:
        return _story(job.rank, str(getattr(error, "filename", None) or job.target), error)
    _prune(job)
    return ""


def _prune(job: Job) -> None:
    newest = job.manifest.iteration
    if newest is None or job.limit is None:
        return
    project = job.target.parent
    for iteration in outdated(complete_ones(project), newest=newest, limit=job.limit):
        try:
            delete(project / layout.numbered_name(iteration))
        except OSError as error:
            logger.warning("checkpoint_%d could not be deleted: %s", iteration, error)


def _story(rank: int, name: str, error: Exception) -> str:
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
