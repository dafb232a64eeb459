"""Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_trackers.general import on_main_process
from accel_trackers.images import to_images
from accel_trackers.libraries.project_run import ProjectRunTracker
from accel_trackers.values import to_plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class WandBTracker(ProjectRunTracker):
    """Log to a run of Weights & Biases; `kwargs` are more arguments of `wandb.init`.

    A process of its own writes what is logged within about ten seconds, a step when a later one is logged.
    """

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters in the run's config; those of a run that goes on may have changed."""
        self.run.config.update(to_plain(values), allow_val_change=True)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` are `dataformats`, the axes of arrays, and more arguments of `wandb.Image`."""
        dataformats = kwargs.pop("dataformats", None)
        images = {
            name: [self._library.Image(image, **kwargs) for image in to_images(name, value, dataformats)]
            for name, value in values.items()
        }
        self.run.log(images, step=step)

    @on_main_process
    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table; `kwargs` go to `run.log`."""
        rows = None if data is None else [list(row) for row in data]
        table = self._library.Table(columns=columns, data=rows, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def log_histograms(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log distributions of values; `kwargs` go to `wandb.Histogram`."""
        self.run.log(self._histograms(values, **kwargs), step=step)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts; `kwargs` go to `run.log`."""
        self.run.log(dict(values), step=step, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file; `kwargs` go to `wandb.Artifact`."""
        name = artifact_path or Path(local_path).name
        artifact = self._library.Artifact(**{"name": name, "type": "file", **kwargs})
        artifact.add_file(str(local_path))
        self.run.log_artifact(artifact)
