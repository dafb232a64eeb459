"""Open a checkpoint: all ranks verify and read it while no process replaces it, before any object changes."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from accel_state.errors import CheckpointError
from accel_train.checkpoint import folder as folders
from accel_train.checkpoint import layout
from accel_train.checkpoint.apply import Source
from accel_train.checkpoint.manifest import shares
from accel_train.checkpoint.sharded import model_loader, optimizer_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from accel_train.checkpoint.run import Run

logger = logging.getLogger(__name__)

WHAT = "load_state()"
_ATTEMPTS = 50


def open_newest_complete(run: Run, candidates: Sequence[Path], options: Mapping[str, Any]) -> Source:
    """Open the first complete one of several checkpoints, the same on all ranks; raise if there is none."""
    problems: list[str] = []
    for folder in candidates:
        found = _open_committed(run, folder, options)
        if isinstance(found, Source):
            return found
        problems.append(found)
        if len(candidates) > 1:
            logger.warning("Passed over: %s", found)
    raise CheckpointError(problems[0] if len(problems) == 1 else f"No checkpoint is whole. {problems[0]}")


def first_problem(problems: Iterable[str]) -> str:
    """Return the first of the problems of all ranks, with its rank; empty if there is none."""
    return next((f"rank {rank}: {one}" for rank, one in enumerate(problems) if one), "")


def _open_committed(run: Run, folder: Path, options: Mapping[str, Any]) -> Source | str:
    """Open a checkpoint, or its replacement; return its problem."""
    for _ in range(_ATTEMPTS):
        found = _attempt(run, folder, options)
        if found is not None:
            return found
        logger.debug("%s was replaced while it was being opened.", folder)
    raise CheckpointError(f"{str(folder)!r} is replaced by another process again and again: try later.")


def _attempt(run: Run, folder: Path, options: Mapping[str, Any]) -> Source | str | None:
    """Open a checkpoint; return its problem, or `None` if it was replaced meanwhile."""
    source, absent, blocked = _located(run, folder, options)
    aside, rest = _to_verify(run, source)
    has_models, failure = (False, None) if absent else _tried(_open_models, run, source)
    with ThreadPoolExecutor(1, "accel-verify") as thread:  # while this one reads the others
        damage = thread.submit(_damage, replace(source, records={}), aside) if aside else None
        if not absent and failure is None:
            has_others, failure = _tried(_open_others, run, source)
            source = replace(source, is_open=has_models and has_others)
        damaged = absent or _damage(source, rest) or (damage and damage.result()) or ""
    damages = _exchange(run, source, damaged, blocked=blocked)
    if damages is None or damages:
        return damages
    is_known = isinstance(failure, (OSError, CheckpointError))
    problem = "" if failure is None else str(failure) if is_known else repr(failure)
    problems = _exchange(run, source, problem)
    if failure is not None and not is_known:
        raise failure
    if problems and source.manifest is not None:  # what was saved is whole, and is something else
        raise CheckpointError(problems)
    return source if problems == "" else problems


def _tried(step: Callable[[Run, Source], bool], run: Run, source: Source) -> tuple[bool, Exception | None]:
    """Return what a step returns, and its error: all ranks must hear of it."""
    try:
        return step(run, source), None
    except Exception as error:  # noqa: BLE001 - classes of users may be unpickled
        return False, error


def _located(run: Run, folder: Path, options: Mapping[str, Any]) -> tuple[Source, str, bool]:
    """Return a checkpoint, the problem of its folder, and whether a writer died."""
    manifest, problem, blocked = None, "", True
    stamp = folders.identity(folder)
    try:
        folders.wait_until_replaced(folder, repair=run.commits)
        blocked = False
        stamp = folders.identity(folder)
        manifest = folders.check(folder)
    except (OSError, CheckpointError) as error:
        problem = str(error)
    source = Source(
        folder=folder,
        manifest=manifest,
        rank=run.rank,
        world_size=run.runtime.topology.world_size,
        device=run.runtime.device,
        stamp=stamp,
        **options,
    )
    return source, problem, blocked


def _to_verify(run: Run, source: Source) -> tuple[list[str], list[str]]:
    """Return this rank's share of the files: those to verify while others are read, and after that."""
    if source.manifest is None:
        return [], []
    topology = run.runtime.topology
    together = topology.local_world_size if run.project.save_on_each_node else topology.world_size
    files = source.manifest.files
    mine = shares(files, together)[run.rank - run.committer]
    aside = [name for name in mine if files[name].size > folders.SMALL and not source.hashes(name)]
    return aside, [name for name in mine if name not in aside]


def _damage(source: Source, names: Sequence[str]) -> str:
    """Verify files, and all that were hashed while they were read; return the problem."""
    if source.manifest is None:
        return ""
    try:
        folders.verify(source.folder, source.manifest, names, source.records, source.record_of)
    except (OSError, CheckpointError) as error:
        return str(error)
    return ""


def _exchange(run: Run, source: Source, problem: str, *, blocked: bool = False) -> str | None:
    """Return the first problem of all ranks; `None` if they have seen several checkpoints."""
    text = "" if source.manifest is None else source.manifest.to_text()
    digest = xxhash.xxh3_64(text.encode()).hexdigest() if text else ""
    mine = digest, blocked or source.is_unchanged(), problem
    digests, committed, problems = zip(*run.main.exchange(WHAT, mine), strict=True)
    one_folder = not run.project.save_on_each_node
    if not all(committed) or (one_folder and len({*digests} - {""}) > 1):
        return None
    return first_problem(problems)


def _open_others(run: Run, source: Source) -> bool:
    """Read the files of all but the models; return whether no other files are needed. No collective."""
    prepared = run.prepared
    shards = [optimizer_loader(run, source, index) for index in range(len(prepared.optimizers))]
    names = [] if any(shards) else [layout.optimizer_name(index) for index in range(len(shards))]
    names += map(layout.scheduler_name, range(len(prepared.schedulers)))
    names += map(layout.custom_name, range(len(run.custom)))
    for name in names:
        source.open(name, map_location=source.map_location)
    optional = [source.rng_name()]
    if run.precision.state_dict():
        optional.append(layout.SCALER_NAME)
    if run.recipe is not None and run.recipe.state_dict is not None:
        optional.append(layout.RECIPE_NAME)
    if prepared.dataloaders:
        optional.append(source.position_name())
    for name in optional:
        if name is not None and source.has(name):
            source.open(name)
    return not any(shards)


def _open_models(run: Run, source: Source) -> bool:
    """Map the weights; return whether no other files of models are needed. No collective."""
    if run.load_hooks:  # they may load models themselves, and take them from the list
        return False
    count = len(run.prepared.models)
    full = [index for index in range(count) if model_loader(run, source, index) is None]
    for index in full:
        source.open(source.weights_name(index))
    return len(full) == count
