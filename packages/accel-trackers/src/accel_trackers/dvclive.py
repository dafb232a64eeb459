"""DVCLive: files of a DVC project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_state.errors import SettingsError, UnsupportedError
from accel_trackers.general import GeneralTracker, import_vendor, on_main_process
from accel_trackers.values import named_images, split, to_flat


class DVCLiveTracker(GeneralTracker):
    """Write metrics, parameters and plots with DVCLive, before a call returns.

    Args:
        run_name: Not used: DVC names experiments; `exp_name` of `Live` does it.
        live: A `dvclive.Live` to log to; a new one if `None`.
        **kwargs: Arguments of `Live`.

    Raises:
        MissingDependencyError: dvclive is not installed.
        SettingsError: There are a `live` and arguments for another one.
    """

    name = "dvclive"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__()
        if live is not None and kwargs:
            raise SettingsError(
                f"DVCLiveTracker(live=…) logs to that object, and {', '.join(sorted(kwargs))} would be "
                "for a new one: remove one of the two."
            )
        self.run_name = run_name
        self._dvclive = import_vendor(self.name)
        self.live: Any = live if live is not None else self._dvclive.Live(**kwargs)

    @property
    def tracker(self) -> Any:
        """The `Live`."""
        return self.live

    @property
    def run_id(self) -> str | None:
        """The folder."""
        return str(self.live.dir)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        return {"dir": run_id, "resume": True}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters in `params.yaml`, flattened; `None` is a text."""
        flat = {name: "None" if value is None else value for name, value in to_flat(values).items()}
        self.live.log_params(flat)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers and texts as metrics."""
        self._set_step(step)
        numbers, texts, vectors = split(self.name, values)
        for name, value in {**numbers, **texts}.items():
            self.live.log_metric(name, value, **kwargs)
        self._log_vectors(vectors, step)
        self.live.next_step()

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; see `GeneralTracker.log_images`. The one option is `dataformats`, the axes of arrays.

        Raises:
            UnsupportedError: Another option was passed.
        """
        dataformats = kwargs.pop("dataformats", None)
        if kwargs:
            raise UnsupportedError(f"DVCLive has no options for images, not {', '.join(sorted(kwargs))}.")
        self._set_step(step)
        for file, image in named_images(values, dataformats, separator="_"):
            array = image.squeeze(-1) if image.shape[-1] == 1 else image
            self.live.log_image(f"{file}.png", array)

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
        """Log a table as data of a plot; `kwargs` go to `Live.log_plot`, such as `x`, `y` and `template`."""
        if dataframe is not None:
            columns, data = [str(name) for name in dataframe.columns], dataframe.to_numpy().tolist()
        names = columns or [str(number) for number in range(len(data[0]) if data else 0)]
        rows = [dict(zip(names, row, strict=True)) for row in data or ()]
        options = {"x": names[0], "y": names[-1], **kwargs} if names else kwargs
        file = table_name if step is None else f"{table_name}_{step}"
        self.live.log_plot(file, rows, **options)

    @on_main_process
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Track a file with DVC; `kwargs` go to `Live.log_artifact`.

        Args:
            local_path: The file.
            artifact_path: Its name.
            **kwargs: More arguments of `Live.log_artifact`.

        Raises:
            UnsupportedError: This is not a DVC repository.
        """
        if self.live._dvc_repo is None:
            raise UnsupportedError(
                f"DVCLive cannot log the artifact {str(local_path)!r} outside of a DVC repository: run "
                "`dvc init` first."
            )
        self.live.log_artifact(str(local_path), name=artifact_path, **kwargs)

    @on_main_process
    def finish(self) -> None:
        """Write the summary and end."""
        self.live.end()

    def _set_step(self, step: int | None) -> None:
        if step is not None:
            self.live.step = step
