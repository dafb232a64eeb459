"""Trackers of libraries that open a run of a project: wandb, comet_ml, swanlab, trackio."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from accel_trackers.general import GeneralTracker, Images, Rows, import_vendor, on_main_process
from accel_trackers.values import join_keys, named_images, separate_vectors, split, to_flat, to_plain


class ProjectRunTracker(GeneralTracker):
    """Log to a run of a project.

    Args:
        run_name: Name of the project.
        **kwargs: More arguments of the library's function that opens a run.

    Attributes:
        run: The library's run.
    """

    requires_logging_directory = False
    opens_with: ClassVar[tuple[str, str]] = ("init", "project")
    """The library's function that opens a run, and its parameter for the project."""
    resumes_with = ("run.id", "id", {"resume": "allow"})

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._library = import_vendor(self.name)
        function, project = self.opens_with
        self.run: Any = getattr(self._library, function)(**{project: run_name, **kwargs})

    tracker = property(attrgetter("run"))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters in the run's config."""
        self.run.config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts and objects of the library; tensors with several elements as histograms."""
        scalars, vectors = separate_vectors(values)
        histograms = self._histograms(self._finite_elements(vectors)) if vectors else {}
        self.run.log({**scalars, **histograms}, step=step, **kwargs)

    def _log_histograms(self, values: Mapping[str, Any], step: int | None, options: dict[str, Any]) -> None:
        self.run.log(self._histograms(values, **options), step=step)

    def _histograms(self, values: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Create histograms of the library."""
        return {name: self._library.Histogram(value, **options) for name, value in values.items()}

    @on_main_process
    def finish(self) -> None:
        self.run.finish()


class WandBTracker(ProjectRunTracker):
    """Log to a run of Weights & Biases; `kwargs` are more arguments of `wandb.init`.

    A separate process writes logged values within about ten seconds, a step once a later one is logged.
    """

    name = "wandb"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters in the run's config; they may differ from those of a resumed run."""
        self.run.config.update(to_plain(values), allow_val_change=True)

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        pictures = {
            name: [self._library.Image(image, **options) for image in batch] for name, batch in images.items()
        }
        self.run.log(pictures, step=step)

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        self.run.log({name: self._library.Table(columns=columns, data=rows)}, step=step, **options)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        self.run.log(dict(texts), step=step, **options)

    def _log_artifact(self, path: str, name: str | None, options: dict[str, Any]) -> None:
        name = name or Path(path).name
        artifact = self._library.Artifact(**{"name": name, "type": "file", **options})
        artifact.add_file(path)
        self.run.log_artifact(artifact)


class CometMLTracker(ProjectRunTracker):
    """Log to an experiment of Comet; `kwargs` are more arguments of `comet_ml.start`.

    Comet's thread writes logged values asynchronously.
    """

    name = "comet_ml"
    opens_with = ("start", "project_name")
    resumes_with = ("run", "experiment_key", {"mode": "get_or_create"})

    writer = property(attrgetter("run"))

    @property
    def run_id(self) -> str | None:
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

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        fromarray = import_vendor(self.name, "PIL.Image").fromarray
        for name, batch in images.items():
            for image in batch:
                picture = fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image)
                self.run.log_image(picture, name=name, step=step, **options)

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        self._set_step(step)
        file = name if name.endswith((".csv", ".tsv")) else f"{name}.csv"
        file = file if step is None else f"step_{step}_{file}"
        self.run.log_table(file, tabular_data=rows, headers=columns, **options)

    def _log_histograms(self, values: Mapping[str, Any], step: int | None, options: dict[str, Any]) -> None:
        for name, value in values.items():
            self.run.log_histogram_3d(value, name=name, step=step, **options)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        for name, text in texts.items():
            self.run.log_text(text, step=step, metadata={"name": name}, **options)

    def _log_artifact(self, path: str, name: str | None, options: dict[str, Any]) -> None:
        self.run.log_asset(path, file_name=name, **options)

    @on_main_process
    def finish(self) -> None:
        """End the experiment: send logged values, or write the offline archive."""
        self.run.end()

    def _set_step(self, step: int | None) -> None:
        if step is not None:
            self.run.set_step(step)


class SwanLabTracker(ProjectRunTracker):
    """Log to a run of SwanLab; `kwargs` are more arguments of `swanlab.init`.

    What is logged is written within twenty seconds.
    """

    name = "swanlab"
    _log_histograms = GeneralTracker._log_histograms  # which it does not have

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts and objects of SwanLab."""
        scalars, vectors = separate_vectors(join_keys(values))
        text = self._library.Text
        texts = {name: text(value) for name, value in scalars.items() if isinstance(value, str)}
        self.run.log({**scalars, **texts}, step=step, **kwargs)
        self._log_vectors(vectors, step)

    @on_main_process
    def flush(self) -> None:
        """Flush the run's file, which SwanLab itself does only at the end of the run."""
        core = getattr(self.run, "_core", None)
        store = getattr(core, "_store", None)
        if store is not None:
            store.ensure_flushed()

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        pictures = {
            name: [self._library.Image(_with_colours(image), **options) for image in batch]
            for name, batch in images.items()
        }
        self.run.log(pictures, step=step)

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        table = self._library.echarts.Table()
        table.add(columns, rows)
        self.run.log({name: table}, step=step, **options)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        texts = {name: self._library.Text(text, **options) for name, text in texts.items()}
        self.run.log(texts, step=step)


class TrackioTracker(ProjectRunTracker):
    """Log to a run of Trackio; `kwargs` are more arguments of `trackio.init`.

    Trackio's thread writes what is logged within half a second.
    """

    name = "trackio"
    resumes_with = ("run.name", "name", {"resume": "allow"})

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        pictures = {
            name: self._library.Image(_with_colours(image), **options) for name, image in named_images(images)
        }
        self.run.log(pictures, step=step)

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        self.run.log({name: self._library.Table(columns=columns, data=rows, **options)}, step=step)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        texts = {name: self._library.Markdown(text, **options) for name, text in texts.items()}
        self.run.log(texts, step=step)

    def _log_artifact(self, path: str, name: str | None, options: dict[str, Any]) -> None:
        self.run.log_artifact(path, name=name, **options)


def _with_colours(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert shades to colours, for libraries without images of one channel."""
    return image.repeat(3, axis=-1) if image.shape[-1] == 1 else image
