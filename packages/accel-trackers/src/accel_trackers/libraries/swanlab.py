"""SwanLab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trackers.general import GeneralTracker, on_main_process
from accel_trackers.images import to_images
from accel_trackers.values import join_keys, to_number, to_plain
from accel_trackers.vendor import import_vendor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SwanLabTracker(GeneralTracker):
    """Log to a run of SwanLab.

    Args:
        run_name: Name of the project.
        **kwargs: More arguments of `swanlab.init`.

    Raises:
        MissingDependencyError: swanlab is not installed.
    """

    name = "swanlab"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self._swanlab = import_vendor(self.name)
        self.run: Any = self._swanlab.init(**{"project": run_name, **kwargs})

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    @property
    def run_id(self) -> str | None:
        """The run's id."""
        return self.run.id

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        """Arguments of `swanlab.init`."""
        return {"id": run_id, "resume": "allow"}

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters in the run's config."""
        self.run.config.update(to_plain(values))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts and objects of SwanLab.

        Args:
            values: By name.
            step: At which step.
            **kwargs: More arguments of `run.log`.
        """
        given = {name: to_number(name, value) for name, value in join_keys(values).items()}
        texts = {name: self._swanlab.Text(value) for name, value in given.items() if isinstance(value, str)}
        self.run.log({**given, **texts}, step=step, **kwargs)

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images; see `GeneralTracker.log_images`.

        Args:
            values: By name.
            step: At which step.
            **kwargs: `dataformats`, the axes of arrays, and more arguments of `swanlab.Image`.
        """
        dataformats = kwargs.pop("dataformats", None)
        images = {
            name: [
                self._swanlab.Image(image.repeat(3, axis=-1) if image.shape[-1] == 1 else image, **kwargs)
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
        table = self._swanlab.echarts.Table()
        table.add(list(columns or ()), [list(row) for row in data or ()])
        self.run.log({table_name: table}, step=step, **kwargs)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts; `kwargs` go to `swanlab.Text`."""
        texts = {name: self._swanlab.Text(text, **kwargs) for name, text in values.items()}
        self.run.log(texts, step=step)

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
