"""Experiment trackers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_state import runtime
from accel_state.errors import CheckpointError
from accel_train.accelerator.facet import Facet
from accel_train.checkpoint import layout

if TYPE_CHECKING:
    import os

    from accel_trackers.general import GeneralTracker
    from accel_trackers.session import TrackerSession
    from accel_train.checkpoint.run import Run


class TrackingFacet(Facet):
    """Log hyperparameters and values. Every method may be called on every process; the main one logs."""

    __slots__ = ()

    @property
    def log_with(self) -> list[str | GeneralTracker]:
        """The trackers of `Accelerator(log_with=…)`."""
        return self._parts.trackers.log_with

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers, after `init_trackers`; on other ranks, placeholders that do nothing."""
        return self._parts.trackers.trackers

    def init_trackers(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker of `log_with`, and store hyperparameters.

        After `load_state`, the runs go on that the checkpoint names. Runs of an earlier `init_trackers` are
        finished first.

        Args:
            project_name: Name of the project, or of the run where a tracker has no projects.
            config: Hyperparameters: a dictionary, a dataclass or an argparse namespace. It is not changed.
            init_kwargs: More arguments for a tracker's construction, by its name, such as
                `{"wandb": {"name": "baseline"}}`.

        Raises:
            SettingsError: `config` has another type.
            Exception: What a tracker raised, with `on_tracker_error="raise"`.

        Example:
            >>> import tempfile
            >>> from accel_train import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> accelerator.init_trackers("digits", config={"lr": 0.1})
            >>> accelerator.log({"loss": 0.5}, step=1)
            >>> accelerator.end_training()
        """
        self._parts.trackers.start(project_name, config, init_kwargs)
        _save_runs(self._parts.checkpoints, self._parts.trackers)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values with every tracker; nothing without trackers.

        It does not wait for a device: tensors there are copied on the side and written by a later call, in
        order, by `save_state`, by `end_training`, or at the end of the program, also by an exception. Every
        ten seconds a call lets the trackers flush. With `log_system_metrics=True`, what was measured since
        the last call is added.

        Args:
            values: By name numbers, texts, tensors, dictionaries of these, and what else a tracker's library
                takes. Tensors with several elements become histograms where the library has them; what it
                cannot take is skipped with one warning for each name.
            step: The step.
            log_kwargs: More arguments of a tracker's `log`, by its name.

        Raises:
            TrackerError: It is too early, before `init_trackers`, too late, after `end_training`, or in a
                process that was forked from the one that called `init_trackers`.
            UnsupportedError: `values` is no dictionary.
            Exception: What a tracker raised, with `on_tracker_error="raise"`.
        """
        parts = self._parts
        if parts.meter is not None and isinstance(values, Mapping):
            values = {**parts.meter.read(), **values}
        parts.trackers.log(values, step, log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Find a tracker, for what only it can do, such as `log_images`.

        Args:
            name: Its name.
            unwrap: Whether to return the library's own object, such as the run of wandb.

        Returns:
            The tracker; on other ranks, and without trackers, a placeholder that does nothing.

        Raises:
            SettingsError: There are trackers, but none of that name.
        """
        return self._parts.trackers.get(name, unwrap=unwrap)

    def end_training(self) -> None:
        """Write what was logged, finish the trackers, and leave the process group.

        The last call of a program. Without trackers and with one process it does nothing. While an exception
        is on its way, as in `finally`, it does not wait for ranks that do not answer.

        Raises:
            Exception: What a tracker raised, with `on_tracker_error="raise"`.
        """
        try:
            self._parts.trackers.finish()
        finally:
            self._parts.process.destroy_process_group()


def _save_runs(checkpoints: Run, trackers: TrackerSession) -> None:
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
        trackers.resume(_read_run_ids(file))


def _read_run_ids(file: Path) -> dict[str, str]:
    try:
        read: Any = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(
            f"{file} is damaged: {error}. Load another checkpoint, or remove it."
        ) from error
    if not isinstance(read, dict) or not all(isinstance(value, str) for value in read.values()):
        raise CheckpointError(
            f"{file} holds no ids of runs by tracker. Load another checkpoint, or remove it."
        )
    return read
