"""The trackers of libraries that open a run of a project with one function and its keyword arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from accel_trackers.general import GeneralTracker, on_main_process
from accel_trackers.images import to_numbers
from accel_trackers.values import separate_vectors, to_plain
from accel_trackers.vendor import import_vendor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
    """That function's parameter for the id of a run to go on with, and what else it needs then."""

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
        """The run's id."""
        return self.run.id

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        """Arguments of the library's function that opens a run."""
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
        """Return the run's own method, unless a subclass logs otherwise: nothing is left to convert."""
        return self.run.log if type(self).log is ProjectRunTracker.log else super().log_captured()

    def _histograms(self, values: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Make histograms of the library."""
        return {name: self._library.Histogram(to_numbers(value), **kwargs) for name, value in values.items()}

    @on_main_process
    def finish(self) -> None:
        """End the run."""
        self.run.finish()
