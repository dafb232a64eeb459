"""Trackio: a database on this machine, or a Space."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trackers.general import on_main_process
from accel_trackers.images import named_images
from accel_trackers.libraries.project_run import ProjectRunTracker

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class TrackioTracker(ProjectRunTracker):
    """Log to a run of Trackio; `kwargs` are more arguments of `trackio.init`.

    Trackio's thread writes what is logged within half a second.
    """

    name = "trackio"
    resumes_with = ("name", {"resume": "allow"})

    @property
    def run_id(self) -> str | None:
        """The run's name."""
        return self.run.name

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` are `dataformats`, their axes, and arguments of `trackio.Image`."""
        dataformats = kwargs.pop("dataformats", None)
        logged: dict[str, Any] = {}
        for key, image in named_images(values, dataformats):
            colours = image.repeat(3, axis=-1) if image.shape[-1] == 1 else image
            logged[key] = self._library.Image(colours, **kwargs)
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
        table = self._library.Table(columns=columns, data=rows, dataframe=dataframe, **kwargs)
        self.run.log({table_name: table}, step=step)

    @on_main_process
    def log_histograms(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log distributions of values; `kwargs` go to `trackio.Histogram`."""
        self.run.log(self._histograms(values, **kwargs), step=step)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts, shown as Markdown."""
        texts = {name: self._library.Markdown(text, **kwargs) for name, text in values.items()}
        self.run.log(texts, step=step)

    @on_main_process
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file; `kwargs` go to `run.log_artifact`."""
        self.run.log_artifact(str(local_path), name=artifact_path, **kwargs)
