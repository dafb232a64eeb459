"""Comet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trackers.general import on_main_process
from accel_trackers.images import to_images, to_numbers
from accel_trackers.libraries.project_run import ProjectRunTracker
from accel_trackers.values import split, to_flat
from accel_trackers.vendor import import_vendor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class CometMLTracker(ProjectRunTracker):
    """Log to an experiment of Comet; `kwargs` are more arguments of `comet_ml.start`.

    Comet's thread writes what is logged as soon as it gets to it.
    """

    name = "comet_ml"
    opens_with = ("start", "project_name")
    resumes_with = ("experiment_key", {"mode": "get_or_create"})

    @property
    def writer(self) -> Any:
        """The experiment."""
        return self.run

    @property
    def run_id(self) -> str | None:
        """The experiment's key."""
        return self.run.get_key()

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as parameters, flattened."""
        self.run.log_parameters(to_flat(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, texts as `other`, and tensors with several elements as histograms."""
        numbers, texts, vectors = split(self.name, values)
        if numbers:
            self.run.log_metrics(numbers, step=step, **kwargs)
        elif texts:
            self._set_step(step)
        for name, text in texts.items():
            self.run.log_other(name, text)
        self._log_vectors(vectors, step)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` are `dataformats`, the axes of arrays, and more arguments of `log_image`."""
        fromarray = import_vendor(self.name, "PIL.Image").fromarray
        dataformats = kwargs.pop("dataformats", None)
        for name, value in values.items():
            for image in to_images(name, value, dataformats):
                picture = fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
                self.run.log_image(picture, name=name, step=step, **kwargs)

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
        """Log a table as a CSV file; `kwargs` go to `log_table` of Comet."""
        self._set_step(step)
        name = table_name if table_name.endswith((".csv", ".tsv")) else f"{table_name}.csv"
        name = name if step is None else f"step_{step}_{name}"
        rows = dataframe if dataframe is not None else [list(row) for row in data or ()]
        headers: Any = columns if columns is not None else dataframe is not None
        self.run.log_table(name, tabular_data=rows, headers=headers, **kwargs)

    @on_main_process
    def log_histograms(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log distributions of values; `kwargs` go to `log_histogram_3d`."""
        for name, value in values.items():
            self.run.log_histogram_3d(to_numbers(value), name=name, step=step, **kwargs)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts; `kwargs` go to `log_text` of Comet."""
        for name, text in values.items():
            self.run.log_text(text, step=step, metadata={"name": name}, **kwargs)

    @on_main_process
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file as an asset; `kwargs` go to `log_asset`."""
        self.run.log_asset(str(local_path), file_name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """End the experiment: what was logged is sent, or the offline archive written."""
        self.run.end()

    def _set_step(self, step: int | None) -> None:
        if step is not None:
            self.run.set_step(step)
