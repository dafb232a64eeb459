"""SwanLab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accel_trackers.general import on_main_process
from accel_trackers.images import to_images
from accel_trackers.libraries.project_run import ProjectRunTracker
from accel_trackers.values import NUMBERS, join_keys, separate_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
                values = self._with_texts(values)
                break
        if kwargs:
            self.run.log(values, step=step, **kwargs)
        else:  # which costs less
            self.run.log(values, step=step)

    def _with_texts(self, values: dict[str, Any]) -> dict[str, Any]:
        text = self._library.Text
        return {name: text(one) if type(one) is str else one for name, one in join_keys(values).items()}

    @on_main_process
    def flush(self) -> None:
        """Write what the run's file holds back, which SwanLab itself does when the run ends."""
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
