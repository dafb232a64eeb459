"""Trackio: a database on this machine, or a Space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trackers.general import GeneralTracker, on_main_process
from accel_trackers.images import to_images, to_numbers
from accel_trackers.values import to_number, to_plain
from accel_trackers.vendor import import_vendor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class TrackioTracker(GeneralTracker):
    """Log to a run of Trackio.

    Args:
        run_name: Name of the project.
        **kwargs: More arguments of `trackio.init`.

    Raises:
        MissingDependencyError: trackio is not installed.
    """

    name = "trackio"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._trackio = import_vendor(self.name)
        self.run: Any = self._trackio.init(**{"project": run_name, **kwargs})

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @property
    def run_id(self) -> str | None:
        """The run's name."""
        return self.run.name

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        """Arguments of `trackio.init`."""
        return {"name": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters in the run's config."""
        self.run.config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts and objects of Trackio.

        Args:
            values: By name.
            step: At which step.
            **kwargs: More arguments of `run.log`.
        """
        self.run.log({name: to_number(name, value) for name, value in values.items()}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; see `GeneralTracker.log_images`.

        Args:
            values: By name.
            step: At which step.
            **kwargs: `dataformats`, the axes of arrays, and more arguments of `trackio.Image`.
        """
        dataformats = kwargs.pop("dataformats", None)
        logged: dict[str, Any] = {}
        for name, value in values.items():
            images = to_images(name, value, dataformats)
            for number, image in enumerate(images):
                key = name if len(images) == 1 else f"{name}/{number}"
                colours = image.repeat(3, axis=-1) if image.shape[-1] == 1 else image
                logged[key] = self._trackio.Image(colours, **kwargs)
        self.run.log(logged, step=step)

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
        """Log a table; `kwargs` go to `trackio.Table`."""
        rows = None if data is None else [list(row) for row in data]
        table = self._trackio.Table(columns=columns, data=rows, dataframe=dataframe, **kwargs)
        self.run.log({table_name: table}, step=step)

    @on_main_process
    def log_histograms(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log distributions of values; `kwargs` go to `trackio.Histogram`."""
        histograms = {
            name: self._trackio.Histogram(to_numbers(value), **kwargs) for name, value in values.items()
        }
        self.run.log(histograms, step=step)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts, shown as Markdown."""
        texts = {name: self._trackio.Markdown(text, **kwargs) for name, text in values.items()}
        self.run.log(texts, step=step)

    @on_main_process
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file; `kwargs` go to `run.log_artifact`."""
        self.run.log_artifact(str(local_path), name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
