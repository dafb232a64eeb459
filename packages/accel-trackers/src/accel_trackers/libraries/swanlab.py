"""SwanLab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trackers.general import on_main_process
from accel_trackers.images import to_images
from accel_trackers.libraries.project_run import ProjectRunTracker
from accel_trackers.values import join_keys, with_numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class SwanLabTracker(ProjectRunTracker):
    """Log to a run of SwanLab; `kwargs` are more arguments of `swanlab.init`.

    What is logged is written within twenty seconds.
    """

    name = "swanlab"

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log numbers, texts and objects of SwanLab.

        Args:
            values: By name.
            step: At which step.
            **kwargs: More arguments of `run.log`.
        """
        logged = with_numbers(join_keys(values))
        for name, value in logged.items():
            if type(value) is str:
                logged[name] = self._library.Text(value)
        self.run.log(logged, step=step, **kwargs)

    @on_main_process
    def flush(self) -> None:
        """Write what the run's file holds back, which SwanLab itself does when the run ends."""
        core = getattr(self.run, "_core", None)
        store = getattr(core, "_store", None)
        if store is not None:
            store.ensure_flushed()

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
