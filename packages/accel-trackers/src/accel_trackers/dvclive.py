"""DVCLive: files of a DVC project."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from accel_state.errors import UnsupportedError
from accel_trackers.general import GeneralTracker, Images, Rows, import_vendor, on_main_process
from accel_trackers.values import named_images, split, to_flat


class DVCLiveTracker(GeneralTracker):
    """Write metrics, parameters and plots with DVCLive, before a call returns.

    Args:
        run_name: Not used: DVC names experiments; `exp_name` of `Live` does it.
        live: A `dvclive.Live` to log to; a new one if `None`.
        **kwargs: Arguments of `Live`.
    """

    name = "dvclive"
    requires_logging_directory = False
    resumes_with = ("live.dir", "dir", {"resume": True})

    @on_main_process
    def __init__(self, run_name: str | None = None, live: Any | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._dvclive = import_vendor(self.name)
        self.live: Any = live if live is not None else self._dvclive.Live(**kwargs)

    tracker = property(attrgetter("live"))

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

    def _log_images(self, images: Images, step: int | None, options: dict[str, Any]) -> None:
        del options  # it has none
        self._set_step(step)
        for file, image in named_images(images, separator="_"):
            self.live.log_image(f"{file}.png", image.squeeze(-1) if image.shape[-1] == 1 else image)

    def _log_table(self, name: str, columns: list[str], rows: Rows, step: int | None, options: Any) -> None:
        points = [dict(zip(columns, row, strict=True)) for row in rows]
        axes = {"x": columns[0], "y": columns[-1]} if columns else {}
        self.live.log_plot(name if step is None else f"{name}_{step}", points, **{**axes, **options})

    def _log_artifact(self, path: str, name: str | None, options: dict[str, Any]) -> None:
        if self.live._dvc_repo is None:
            raise UnsupportedError(
                f"DVCLive cannot log the artifact {path!r} outside of a DVC repository: run `dvc init` first."
            )
        self.live.log_artifact(path, name=name, **options)

    @on_main_process
    def finish(self) -> None:
        self.live.end()

    def _set_step(self, step: int | None) -> None:
        if step is not None:
            self.live.step = step
