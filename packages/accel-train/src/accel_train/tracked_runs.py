"""The ids of trackers' runs in a checkpoint, so that a run goes on where the training does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accel_state import runtime
from accel_state.errors import CheckpointError
from accel_train.checkpoint import layout

if TYPE_CHECKING:
    import os

    from accel_trackers.session import TrackerSession
    from accel_train.checkpoint.run import Run


def save_runs(checkpoints: Run, trackers: TrackerSession) -> None:
    """Let `save_state` flush logged values, and write the ids of the runs to `trackers.json`."""

    def save(models: Any, weights: Any, folder: str | os.PathLike[str]) -> None:
        del models, weights
        trackers.write()
        run_ids = trackers.run_ids()
        if run_ids and checkpoints.rank == 0:
            (Path(folder) / layout.TRACKERS_NAME).write_text(json.dumps(run_ids))

    checkpoints.save_hooks[-1] = save  # beside those of users, whose numbers are not negative


def resume_runs(trackers: TrackerSession, folder: Path) -> None:
    """Resume the runs whose ids are in a checkpoint, on the main process."""
    file = folder / layout.TRACKERS_NAME
    if trackers.log_with and runtime.current_topology().is_main and file.exists():
        trackers.resume(_read(file))


def _read(file: Path) -> dict[str, str]:
    try:
        read = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged: {error}. Load another checkpoint, or remove it."
        ) from error
    if not isinstance(read, dict) or not all(
        isinstance(value, str) for value in cast("dict[str, Any]", read).values()
    ):
        raise CheckpointError(
            f"{file} holds no ids of runs by tracker. Load another checkpoint, or remove it."
        )
    return cast("dict[str, str]", read)
