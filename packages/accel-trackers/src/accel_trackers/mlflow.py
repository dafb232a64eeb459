"""MLflow: a store on this machine, or a server."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from accel_state import environ
from accel_trackers.general import GeneralTracker, Images, Rows, import_vendor, on_main_process
from accel_trackers.values import named_images, split, to_flat

logger = logging.getLogger(__name__)


class MLflowTracker(GeneralTracker):
    """Log to a run of MLflow, in the store that `mlflow.set_tracking_uri` or `MLFLOW_TRACKING_URI` name.

    It is written before a call returns. `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_RUN_ID`, `MLFLOW_TAGS` and
    `MLFLOW_NESTED_RUN` take precedence over the arguments.

    Args:
        experiment_name: Name of the experiment; created if absent. MLflow's own choice if `None`.
        logging_dir: Where artifacts of a new experiment go.
        run_id: A run to resume.
        tags: Of the run, as a dictionary or its JSON.
        nested_run: Whether the run is a child of the active one.
        run_name: Name of the run.
        description: Of the run.
    """

    name = "mlflow"
    requires_logging_directory = False
    resumes_with = ("active_run.info.run_id", "run_id", {})

    @on_main_process
    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: dict[str, Any] | str | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        variables = environ.read()
        experiment_name = variables.get("MLFLOW_EXPERIMENT_NAME", experiment_name)
        run_id, tags = variables.get("MLFLOW_RUN_ID", run_id), variables.get("MLFLOW_TAGS", tags)
        if "MLFLOW_NESTED_RUN" in variables:
            nested_run = bool(environ.str_to_bool(variables["MLFLOW_NESTED_RUN"]))
        self._mlflow = import_vendor(self.name)
        self._client: Any = self._mlflow.MlflowClient()
        experiment_id = None
        if experiment_name is not None:
            experiment = self._client.get_experiment_by_name(experiment_name)
            location = None if logging_dir is None else str(logging_dir)
            experiment_id = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(experiment_name, artifact_location=location)
            )
        self.active_run: Any = self._mlflow.start_run(
            run_id=run_id,
            experiment_id=experiment_id,
            run_name=run_name,
            nested=nested_run,
            tags=json.loads(tags) if isinstance(tags, str) else tags,
            description=description,
        )

    tracker = property(attrgetter("active_run"))

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters as parameters, flattened.

        Long values are truncated, and where a resumed run has another value, MLflow keeps the first one; both
        with a warning.
        """
        known: dict[str, str] = self._client.get_run(self.run_id).data.params
        limit: int = self._mlflow.utils.validation.MAX_PARAM_VAL_LENGTH
        most: int = self._mlflow.utils.validation.MAX_PARAMS_TAGS_PER_BATCH
        params: list[Any] = []
        for name, value in to_flat(values).items():
            text = str(value)[:limit]
            if len(text) < len(str(value)):
                logger.warning("MLflow's parameters have %d characters at most: %r is cut.", limit, name)
            if known.get(name, text) == text:
                params.append(self._mlflow.entities.Param(name, text))
            else:
                message = "MLflow keeps the parameter %r at %r: a resumed run cannot change it to %r."
                logger.warning(message, name, known[name], text)
        for first in range(0, len(params), most):
            self._client.log_batch(self.run_id, params=params[first : first + most])

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as metrics, and texts as files."""
        numbers, texts, vectors = split(self.name, values)
        now = int(time.time() * 1000)
        metric = self._mlflow.entities.Metric
        metrics = [metric(name, float(number), now, step or 0) for name, number in numbers.items()]
        if metrics:
            self._client.log_batch(self.run_id, metrics=metrics, **kwargs)
        if texts:
            self.log_text(texts, step=step)
        self._log_vectors(vectors, step)

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        for key, image in named_images(images):
            self._client.log_image(self.run_id, image, key=key, step=step, **options)

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        # Rows are added to those of the same name.
        table = {column: [row[number] for row in rows] for number, column in enumerate(columns)}
        if step is not None:
            table["step"] = [step] * len(rows)
        file = name if name.endswith(".json") else f"{name}.json"
        self._client.log_table(self.run_id, table, file, **options)

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        for name, text in texts.items():
            file = f"{name}.txt" if step is None else f"{name}/{step}.txt"
            self._client.log_text(self.run_id, text, file, **options)

    @on_main_process
    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure of matplotlib or plotly."""
        self._client.log_figure(self.run_id, figure, artifact_file, **save_kwargs)

    def _log_artifact(self, path: str, name: str | None, options: dict[str, Any]) -> None:
        self._client.log_artifact(self.run_id, path, name, **options)

    @on_main_process
    def log_artifacts(self, local_dir: str | Path, artifact_path: str | None = None) -> None:
        """Store the files of a folder."""
        self._client.log_artifacts(self.run_id, str(local_dir), artifact_path)

    @on_main_process
    def finish(self) -> None:
        active = self._mlflow.active_run()
        if active is not None and active.info.run_id == self.run_id:
            self._mlflow.end_run()
        else:
            self._client.set_terminated(self.run_id)
