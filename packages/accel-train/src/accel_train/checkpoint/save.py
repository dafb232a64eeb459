"""Save the state of a run: the steps in order, the same on every rank."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accel_plugins.dcp.protocol import StateForm
from accel_state.errors import (
    CheckpointError,
    CheckpointWriteError,
    DistributedOperationException,
    SettingsError,
)
from accel_state.local_path import local_path
from accel_train.checkpoint import folder, layout
from accel_train.checkpoint.contents import Contents, rank_files, shared_parts
from accel_train.checkpoint.manifest import Manifest
from accel_train.checkpoint.sharded import check_shared, folders_of, form_of, native_parts, sharded_parts
from accel_train.checkpoint.writer import (
    Job,
    Part,
    Report,
    Saving,
    complete,
    staged_parts,
    write_parts,
)

if TYPE_CHECKING:
    import os

    from accel_train.checkpoint.folder import Staging
    from accel_train.checkpoint.run import Run

logger = logging.getLogger(__name__)

WHAT = "save_state()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The arguments of a save; the same on all ranks."""

    folder: str
    iteration: int | None
    safe: bool
    blocking: bool
    to_disk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer of a rank before anything is written.

    Args:
        request: What it was asked.
        staging: The folder that it has made to be written in, if that is its part.
        problem: Why there is none.
        exists: Whether that is because the numbered checkpoint is there already.
    """

    request: Request
    staging: str = ""
    problem: str = ""
    exists: bool = False


def save(
    run: Run, output_dir: str | os.PathLike[str] | None, *, safe: bool, blocking: bool, to_disk: bool
) -> Saving:
    """Save the state of a run, as `Accelerator.save_state`; return the checkpoint, complete if `blocking`."""
    run.finish()
    check_shared(run)
    target = target_of(run, output_dir)
    request = Request(
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


def _save(run: Run, request: Request, job: Job) -> Saving:
    """Write, or start the writer thread."""
    if request.iteration is not None:
        run.project.iteration = request.iteration + 1
    parts: list[Part] = []

    def work() -> None:
        try:
            complete(job, write_parts(job, parts), run.background)
        finally:
            if job.lock is not None:
                job.lock.release()

    saving = Saving(str(job.target), work)
    report, failure = Report(job.committer), None
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
        complete(job, report, run.background)
    except CheckpointWriteError as error:
        raise error from failure
    logger.info("Saved the state to %s.", job.target)
    return saving


def target_of(run: Run, output_dir: str | os.PathLike[str] | None) -> Path:
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


def _agree(run: Run, request: Request, target: Path) -> tuple[Path, Staging | None]:
    """Agree with all ranks on the request; return the staging folder and what to release."""
    # Hosts that share no file system may well save to folders of different names.
    common = replace(request, folder="") if run.project.save_on_each_node else request
    begun, mine = _begin(request, target) if run.commits else (None, Answer(request=request))
    mine = replace(mine, request=common)
    try:
        rows = run.main.exchange(WHAT, asdict(mine))
        answers = [Answer(**(row | {"request": Request(**row["request"])})) for row in rows]
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


def _begin(request: Request, target: Path) -> tuple[Staging | None, Answer]:
    """Make the staging folder."""
    if request.iteration is not None and target.exists():
        return None, _reserve(request, target)
    try:
        begun = folder.begin(target)
    except CheckpointWriteError as error:
        return None, Answer(request=request, problem=str(error))
    except (OSError, CheckpointError) as error:
        name = getattr(error, "filename", None) or target
        reason = getattr(error, "strerror", None) or str(error)
        return None, Answer(request=request, problem=f"{str(name)!r} could not be made: {reason}")
    if request.iteration is not None and target.exists():  # another job was faster
        begun.discard()
        return None, _reserve(request, target)
    return begun, Answer(request=request, staging=str(begun.path))


def _reserve(request: Request, target: Path) -> Answer:
    number = max(folder.numbers(target.parent)) + 1
    problem = (
        f"{str(target)!r} is there already, of an earlier run. Go on from it with load_state(), or set "
        f"ProjectConfiguration(iteration={number})."
    )
    return Answer(request=request, problem=problem, exists=True)


def _job(run: Run, request: Request, target: Path, staging: Path) -> Job:
    step = run.synchronizer.step
    if step:
        logger.warning(
            "The state is saved %d micro-batch(es) after the last optimizer step; their gradients are not "
            "part of it. Save `if accelerator.sync_gradients:`.",
            step,
        )
    world_size = run.runtime.topology.world_size
    return Job(
        target=target,
        staging=staging,
        rank=run.rank,
        committer=run.committer,
        limit=run.project.total_limit,
        to_disk=request.to_disk,
        manifest=Manifest(world_size=world_size, step=step, iteration=request.iteration),
        folders=tuple(folders_of(run)),
    )


def _parts(run: Run, job: Job, *, safe: bool) -> list[Part]:
    """Run the hooks; return the files that this rank writes."""
    prepared, form = run.prepared, form_of(run)
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
