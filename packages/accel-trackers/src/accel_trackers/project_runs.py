"""Trackers of libraries that open a run of a project: wandb, comet_ml, swanlab, trackio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from accel_trackers.general import GeneralTracker, import_vendor, on_main_process
from accel_trackers.values import (
    NUMBERS,
    join_keys,
    named_images,
    separate_vectors,
    split,
    to_flat,
    to_images,
    to_numbers,
    to_plain,
)


class ProjectRunTracker(GeneralTracker):
    """Log to a run of a project.

    Args:
        run_name: Name of the project.
        **kwargs: More arguments of the library's function that opens a run.

    Attributes:
        run: The library's run.

    Raises:
        MissingDependencyError: The library is not installed.
    """

    requires_logging_directory = False
    opens_with: ClassVar[tuple[str, str]] = ("init", "project")
    """The library's function that opens a run, and its parameter for the project."""
    resumes_with: ClassVar[tuple[str, Mapping[str, Any]]] = ("id", {"resume": "allow"})
    """That function's parameter for the id of a run to resume, and further arguments for resuming."""

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._library = import_vendor(self.name)
        function, project = self.opens_with
        self.run: Any = getattr(self._library, function)(**{project: run_name, **kwargs})

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @property
    def run_id(self) -> str | None:
        return self.run.id

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        parameter, more = cls.resumes_with
        return {parameter: run_id, **more}

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

    def log_captured(self) -> Callable[..., object]:
        """Return the run's method, unless a subclass overrides `log`: no values need conversion."""
        return self.run.log if type(self).log is ProjectRunTracker.log else super().log_captured()

    def _histograms(self, values: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Create histograms of the library."""
        return {name: self._library.Histogram(to_numbers(value), **kwargs) for name, value in values.items()}

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


class CometMLTracker(ProjectRunTracker):
    """Log to an experiment of Comet; `kwargs` are more arguments of `comet_ml.start`.

    Comet's thread writes logged values asynchronously.
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

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts and objects of SwanLab."""
        scalars, vectors = separate_vectors(join_keys(values))
        self._log_numbers(scalars, step=step, **kwargs)
        self._log_vectors(vectors, step)

    def log_captured(self) -> Callable[..., object]:
        """Return the function that logs numbers and texts, unless a subclass logs otherwise."""
        return self._log_numbers if type(self).log is SwanLabTracker.log else super().log_captured()

    def _log_numbers(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        for value in values.values():
            if type(value) not in NUMBERS:
                text = self._library.Text
                values = {
                    name: text(value) if type(value) is str else value
                    for name, value in join_keys(values).items()
                }
                break
        if kwargs:
            self.run.log(values, step=step, **kwargs)
        else:  # which costs less
            self.run.log(values, step=step)

    @on_main_process
    def flush(self) -> None:
        """Flush the run's file, which SwanLab itself does only at the end of the run."""
        core = getattr(self.run, "_core", None)
        store = getattr(core, "_store", None)
        if store is not None:
            store.ensure_flushed()

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; `kwargs` are `dataformats`, their axes, and arguments of `swanlab.Image`."""
        dataformats = kwargs.pop("dataformats", None)
        images = {
            name: [
                self._library.Image(image.repeat(3, axis=-1) if image.shape[-1] == 1 else image, **kwargs)
                for image in to_images(name, value, dataformats)
            ]
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
        if dataframe is not None:
            columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
        table = self._library.echarts.Table()
        table.add(list(columns or ()), [list(row) for row in data or ()])
        self.run.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts; `kwargs` go to `swanlab.Text`."""
        texts = {name: self._library.Text(text, **kwargs) for name, text in values.items()}
        self.run.log(texts, step=step)


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
