"""Load the state of a run: the steps in order, the same on every rank."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_ops.modules import extract_model_from_parallel
from accel_state.errors import CheckpointError, DistributedOperationException, SettingsError
from accel_state.local_path import local_path
from accel_train.checkpoint import folder as folders
from accel_train.checkpoint import layout
from accel_train.checkpoint.apply import (
    restore_model,
    restore_positions,
    restore_rng,
    restore_states,
    shortened,
    step_of,
    warn_about_more_models,
)
from accel_train.checkpoint.folder import complete_everywhere
from accel_train.checkpoint.opening import WHAT, first_problem, open_newest_complete
from accel_train.checkpoint.sharded import model_loader, optimizer_loader

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

    from accel_train.checkpoint.apply import Source
    from accel_train.checkpoint.run import Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank says before anything is loaded.

    Args:
        asked: The folder that it was asked for.
        complete: The numbered checkpoints that it sees, if that is its part.
        following: The number that the next checkpoint gets.
        problem: Why it cannot look for them.
    """

    asked: str | None
    complete: list[int] | None = None
    following: int = 0
    problem: str = ""


def load(
    run: Run,
    input_dir: str | os.PathLike[str] | None,
    *,
    options: Mapping[str, Any],
    model_options: Mapping[str, Any],
) -> Path:
    """Load the state of a run, as `Accelerator.load_state`; return the folder of the checkpoint."""
    run.finish()
    to_model = dict(model_options)
    location = to_model.pop("map_location", "cpu")
    location = run.runtime.device if location == "on_device" else location or "cpu"
    candidates = _candidates(run, input_dir)
    source = open_newest_complete(run, candidates, {"map_location": location, "options": options})
    failure: Exception | None = None
    try:
        _restore(run, source, to_model)
        if not source.is_open and not source.is_unchanged():
            raise CheckpointError(
                f"{str(source.folder)!r} was replaced while it was loaded, so that what was loaded may be of "
                "two checkpoints: call load_state() again."
            )
    except RuntimeError as error:
        failure = shortened(error)
    except Exception as error:  # noqa: BLE001 - hooks and load_state_dict are users' code; all ranks must hear
        failure = error
    problem = first_problem(run.main.exchange(WHAT, "" if failure is None else repr(failure)))
    if failure is not None:
        raise failure
    if problem:
        raise CheckpointError(problem)
    logger.info("Loaded the state from %s.", source.folder)
    return source.folder


def has_checkpoint(run: Run) -> bool:
    """Return whether there is a complete numbered checkpoint; call it on every rank."""
    run.finish()
    if not run.is_automatic:
        return False
    return bool(complete_everywhere(_listings(_answers(run, None, "has_checkpoint"))))


def _candidates(run: Run, input_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Return the requested folder, or the numbered checkpoints that look complete, newest first."""
    if input_dir is None and not run.is_automatic:
        raise SettingsError(
            "load_state() needs an input_dir, unless the Accelerator has a "
            "ProjectConfiguration(project_dir=…, automatic_checkpoint_naming=True)."
        )
    requested = None if input_dir is None else local_path(input_dir, "load_state(input_dir)")
    answers = _answers(run, None if input_dir is None else str(input_dir), WHAT)
    if run.is_automatic:
        run.project.iteration = max(answer.following for answer in answers)
    if requested is not None:
        return [requested]
    found = complete_everywhere(_listings(answers))
    if not found:
        raise CheckpointError(
            f"There is no complete checkpoint in {str(run.numbered)!r}. Ask accelerator.has_checkpoint "
            "before load_state()."
        )
    return [run.numbered / layout.numbered_name(iteration) for iteration in reversed(found)]


def _answers(run: Run, asked: str | None, what: str) -> list[Answer]:
    """Gather the answers of all ranks; check that they got the same arguments."""
    mine = _find_candidates(run, asked) if run.commits else Answer(asked=asked)
    answers = [Answer(**row) for row in run.main.exchange(what, asdict(mine))]
    shared = not run.project.save_on_each_node
    if any(answer.asked != asked for answer in answers if shared or None in {answer.asked, asked}):
        raise DistributedOperationException(
            "load_state() was called for different folders: "
            + "; ".join(f"rank {rank}: {answer.asked!r}" for rank, answer in enumerate(answers))
        )
    problem = first_problem(answer.problem for answer in answers)
    if problem:
        raise CheckpointError(problem)
    return answers


def _find_candidates(run: Run, asked: str | None) -> Answer:
    """Find the candidates on the node of this rank."""
    try:
        complete, following = None, 0
        if run.is_automatic:
            if asked is None:
                complete = folders.complete_ones(run.numbered)
            following = max(folders.numbers(run.numbered), default=-1) + 1
        if asked is not None:
            folder = Path(asked).expanduser()
            if not folder.is_dir():
                return Answer(asked=asked, problem=f"there is no folder {asked!r}")
        return Answer(asked=asked, complete=complete, following=following)
    except (OSError, CheckpointError) as error:
        return Answer(asked=asked, problem=f"{error}")


def _listings(answers: Iterable[Answer]) -> list[list[int]]:
    return [answer.complete for answer in answers if answer.complete is not None]


def _restore(run: Run, source: Source, to_model: Mapping[str, Any]) -> None:
    prepared = run.prepared
    models = run.bare_models
    wrapped = dict(zip(map(id, models), prepared.models, strict=True))
    for hook in tuple(run.load_hooks.values()):
        hook(models, str(source.folder))
    for index, model in enumerate(wrapped.get(id(bare), bare) for bare in models):
        load_shards = model_loader(run, source, index)
        if load_shards is not None:
            load_shards(model, **to_model)
            continue
        core = extract_model_from_parallel(model, keep_torch_compile=False)
        load = partial(run.strategy.persister.load_full_state_dict, model)
        restore_model(source, index, core, load=load, **to_model)
    if not run.load_hooks:
        warn_about_more_models(source, len(models))
    _restore_optimizers(run, source)
    restore_states(source, layout.scheduler_name, [one.load_state_dict for one in prepared.schedulers])
    scaler = run.precision.state_dict()
    if scaler and source.has(layout.SCALER_NAME):
        run.precision.load_state_dict(source.read(layout.SCALER_NAME))
    elif scaler or source.has(layout.SCALER_NAME):
        logger.warning(
            "The checkpoint %s was saved %s a loss scaler, and this run is %s one.",
            source.folder,
            *(("without", "with") if scaler else ("with", "without")),
        )
    _restore_recipe(run, source)
    restore_positions(source, prepared.dataloaders)
    restore_states(source, layout.custom_name, [one.load_state_dict for one in run.custom])
    run.synchronizer.step = step_of(source)
    restore_rng(source, run.strategy.generators)  # last: whatever drew random numbers until here


def _restore_recipe(run: Run, source: Source) -> None:
    load = None if run.recipe is None else run.recipe.load_state_dict
    if load is not None and source.has(layout.RECIPE_NAME):
        load(source.read(layout.RECIPE_NAME))
    elif load is not None or source.has(layout.RECIPE_NAME):
        logger.warning(
            "The checkpoint %s was saved %s the state of a precision recipe, and this run %s one.",
            source.folder,
            *(("without", "has") if load is not None else ("with", "has not")),
        )
    if run.recipe is not None and run.recipe.after_load is not None:
        run.recipe.after_load(run.prepared.models)


def _restore_optimizers(run: Run, source: Source) -> None:
    load = run.strategy.persister.load_full_optimizer_state
    models, optimizers = run.prepared.models, run.prepared.optimizers
    loaders = [optimizer_loader(run, source, index) for index in range(len(optimizers))]
    for load_shards, one in zip(loaders, optimizers, strict=True):
        if load_shards is not None:
            load_shards(one.optimizer)
    if not any(loaders):
        restore_states(
            source, layout.optimizer_name, [partial(load, one.optimizer, models) for one in optimizers]
        )
