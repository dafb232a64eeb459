"""Tracker of ClearML tasks."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from accel_state import environ
from accel_trackers.general import GeneralTracker, Images, Rows, import_vendor, on_main_process
from accel_trackers.values import split, to_plain

_PREFIXES = ("train_", "eval_", "test_")


class ClearMLTracker(GeneralTracker):
    """Log to a task of ClearML, a running one of this process if there is one.

    What is logged is written within ten seconds.

    Args:
        run_name: Name of the project and of the task, unless `CLEARML_PROJECT` and `CLEARML_TASK` name them.
        **kwargs: More arguments of `clearml.Task.init`.
    """

    name = "clearml"
    requires_logging_directory = False
    resumes_with = ("task.id", "continue_last_task", {})

    @on_main_process
    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        task_type = import_vendor(self.name).Task
        current = task_type.current_task()
        self._is_ours = current is None
        variables = environ.read()
        names = {
            "project_name": variables.get("CLEARML_PROJECT", run_name),
            "task_name": variables.get("CLEARML_TASK", run_name),
        }
        self.task: Any = current or task_type.init(**{**names, **kwargs})

    tracker = property(attrgetter("task"))

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        """Arguments of `Task.init`; an offline task cannot be continued."""
        return {} if run_id.startswith("offline-") else {"continue_last_task": run_id}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the configuration `General` of the task."""
        self.task.connect_configuration(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers as scalars, or without a step as single values; texts go to the task's log.

        Tensors with several elements become histograms.

        Args:
            values: By name; `"a/b"` and `"train_b"`, `"eval_b"`, `"test_b"` are series of a chart each, and a
                name without such a prefix is the series `train` of a chart of its name.
            step: At which step.
            **kwargs: More arguments of `Logger.report_scalar`.
        """
        logger = self.task.get_logger()
        numbers, texts, vectors = split(self.name, values)
        for name, number in numbers.items():
            if step is None:
                logger.report_single_value(name=name, value=number, **kwargs)
            else:
                title, series = _title_and_series(name)
                logger.report_scalar(title=title, series=series, value=number, iteration=step, **kwargs)
        self.log_text(texts, step=step)
        self._log_vectors(vectors, step)

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        for name, batch in images.items():
            title, series = _title_and_series(name)
            for number, image in enumerate(batch):
                of_image = series if len(batch) == 1 else f"{series}/{number}"
                self.task.get_logger().report_image(
                    title=title, series=of_image, iteration=step, image=image, **options
                )

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        title, series = _title_and_series(name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=[columns, *rows], iteration=step, **options
        )

    def _log_histograms(self, values: Mapping[str, Any], step: int | None, options: dict[str, Any]) -> None:
        for name, value in values.items():
            title, series = _title_and_series(name)
            heights, edges = np.histogram(value, bins=30)
            labels = [f"{edge:.4g}" for edge in edges[:-1]]
            self.task.get_logger().report_histogram(
                title=title, series=series, values=heights, iteration=step, xlabels=labels, **options
            )

    def _log_text(self, texts: Mapping[str, str], step: int | None, options: dict[str, Any]) -> None:
        for name, text in texts.items():
            at = "" if step is None else f" (step {step})"
            self.task.get_logger().report_text(f"{name}{at}: {text}", print_console=False, **options)

    def _log_artifact(self, path: str, name: str | None, options: dict[str, Any]) -> None:
        name = name or Path(path).name
        self.task.upload_artifact(name, artifact_object=path, **options)

    @on_main_process
    def flush(self) -> None:
        self.task.flush()

    @on_main_process
    def finish(self) -> None:
        """Close the task if this tracker started it."""
        if self._is_ours:
            self.task.close()


def _title_and_series(name: str) -> tuple[str, str]:
    """The chart of a value and its series there.

    Example:
        >>> _title_and_series("train_loss"), _title_and_series("loss/a"), _title_and_series("lr")
        (('loss', 'train'), ('loss', 'a'), ('lr', 'train'))
    """
    title, slash, series = name.partition("/")
    if slash:
        return title, series
    prefix = next((candidate for candidate in _PREFIXES if name.startswith(candidate)), None)
    return (name, "train") if prefix is None else (name.removeprefix(prefix), prefix[:-1])
