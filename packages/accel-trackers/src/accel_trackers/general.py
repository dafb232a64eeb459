"""The base of experiment trackers, `GeneralTracker`; null trackers; the import of vendors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, ParamSpec, TypeAlias, TypeVar

import numpy as np

from accel_state import runtime
from accel_state.errors import UnsupportedError
from accel_state.libraries import require
from accel_trackers.values import to_finite, to_images, warn_skipped

_P = ParamSpec("_P")
_R = TypeVar("_R")

Images: TypeAlias = Mapping[str, "list[np.ndarray[Any, Any]]"]
"""By name, arrays of shape (H, W, C) and dtype uint8, C being 1, 3 or 4."""

Rows: TypeAlias = "list[list[Any]]"
"""The rows of a table."""


def on_main_process(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a tracker's method so that only the main process runs it; other ranks return `None`.

    A tracker whose `main_process_only` is False runs it on every rank. The rank is looked up when the method
    is called; nothing is started for it.

    Example:
        >>> class Printer(GeneralTracker):
        ...     name = "printer"
        ...     requires_logging_directory = False
        ...     tracker = None
        ...
        ...     @on_main_process
        ...     def log(self, values, step=None, **kwargs):
        ...         print(step, values)
        >>> Printer().log({"loss": 0.5}, step=3)
        3 {'loss': 0.5}
    """

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> Any:
        tracker: Any = args[0]
        if tracker.main_process_only and not runtime.current_topology().is_main:
            return None
        return function(*args, **kwargs)

    return wrapper


def _without(what: str) -> Callable[..., None]:
    def refuse(tracker: GeneralTracker, *args: Any) -> None:
        del args
        raise UnsupportedError(
            f"The tracker {tracker.name!r} has no {what}: use another tracker, or the library itself, "
            f"get_tracker({tracker.name!r}, unwrap=True)."
        )

    return refuse


class GeneralTracker:
    """Base class of experiment trackers; subclass it for a custom tracker.

    A subclass has the class attributes `name` and `requires_logging_directory`, and `tracker`, the library's
    object. Methods decorated with `on_main_process` may be called on every rank. A class that is selected by
    its name is constructed with the name of the project, the logging directory if it requires one, and its
    entry of `init_kwargs`.

    Args:
        _blank: Whether to skip the check of required attributes.

    Attributes:
        name: Its name in `log_with`, `init_kwargs` and `get_tracker`.
        requires_logging_directory: Whether it is constructed with a logging directory.
        main_process_only: Whether only the main process logs.

    Raises:
        UnsupportedError: An attribute is absent.

    Example:
        >>> class Memory(GeneralTracker):
        ...     name = "memory"
        ...     requires_logging_directory = False
        ...
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.rows = []
        ...
        ...     @property
        ...     def tracker(self):
        ...         return self.rows
        ...
        ...     @on_main_process
        ...     def log(self, values, step=None, **kwargs):
        ...         self.rows.append((step, values))
        >>> memory = Memory()
        >>> memory.log({"loss": 0.5}, step=1)
        >>> memory.tracker
        [(1, {'loss': 0.5})]
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True
    resumes_with: ClassVar[tuple[str, str, Mapping[str, Any]] | None] = None
    """Where the id of a run is in the tracker, the constructor's parameter for it ("" for none), and more
    arguments to resume the run; `None` if it cannot be resumed."""
    tracker: Any  # the library's object

    def __init__(self, _blank: bool = False) -> None:
        if not _blank:
            check_attributes(self)

    def start(self) -> None:
        """Start the run. Called once, by `Accelerator.init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store hyperparameters.

        Args:
            values: Numbers, texts, booleans and `None` by name, and lists and dictionaries of them: a copy
                made by `accel_trackers.values.to_plain`.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values.

        Args:
            values: Numbers and texts by name, dictionaries of them, and other arguments of `Accelerator.log`.
                Tensors with one element are converted to numbers, others copied to the host.
            step: The step.
            **kwargs: The tracker's entry of `log_kwargs`.
        """

    @on_main_process
    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            values: By name an image, a batch or a list of images: arrays or tensors of shape (H, W),
                (H, W, C), (C, H, W) or with a batch in front, integers from 0 to 255, floats from 0 to 1 or
                booleans; or PIL images.
            step: At which step.
            **kwargs: `dataformats`, the axes of arrays such as `"CHW"`, and options of the library.

        Raises:
            UnsupportedError: The library has no images.
        """
        dataformats = kwargs.pop("dataformats", None)
        images = {name: to_images(name, value, dataformats) for name, value in values.items()}
        self._log_images(images, step, kwargs)

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
        """Log a table.

        Args:
            table_name: Its name.
            columns: Names of the columns, with `data`; their numbers if `None`.
            data: The rows.
            dataframe: A pandas data frame, instead of both.
            step: At which step.
            **kwargs: Options of the library.

        Raises:
            UnsupportedError: The library has no tables.
        """
        if dataframe is not None:
            columns, data = [str(name) for name in dataframe.columns], dataframe.itertuples(index=False)
        rows = [list(row) for row in data or ()]
        names = columns or [str(number) for number in range(len(rows[0]) if rows else 0)]
        self._log_table(table_name, names, rows, step, kwargs)

    @on_main_process
    def log_histograms(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log histograms of values.

        Args:
            values: Tensors, arrays or sequences of numbers by name, of any shape.
            step: At which step.
            **kwargs: Options of the library.

        Raises:
            UnsupportedError: The library has no histograms.
        """
        self._log_histograms({name: to_finite(value) for name, value in values.items()}, step, kwargs)

    @on_main_process
    def log_text(self, values: Mapping[str, str], step: int | None = None, **kwargs: Any) -> None:
        """Log texts by name; `kwargs` are options of the library.

        Raises:
            UnsupportedError: The library has no texts.
        """
        self._log_text(values, step, kwargs)

    @on_main_process
    def log_artifact(self, local_path: str | Path, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file with the run.

        Args:
            local_path: The file.
            artifact_path: Its path in the run: a folder for MLflow, else a name; the file's name if
                `None`.
            **kwargs: Options of the library.

        Raises:
            UnsupportedError: The library has no artifacts.
        """
        self._log_artifact(str(local_path), artifact_path, kwargs)

    def flush(self) -> None:
        """Flush the library's buffers; called by `Accelerator.log` at most every ten seconds."""

    def finish(self) -> None:
        """End the run."""

    @property
    def run_id(self) -> str | None:
        """The id with which the library resumes the run; `None` if it cannot."""
        value = attrgetter(self.resumes_with[0])(self) if self.resumes_with else None
        return None if value is None else str(value)

    @classmethod
    def resume_arguments(cls, run_id: str) -> dict[str, Any]:
        """Return the constructor arguments that resume a run."""
        _, parameter, more = cls.resumes_with or ("", "", {})
        return {parameter: run_id, **more} if parameter else {}

    # What the public methods have converted. Only ranks that log call these.
    _log_images = _without("images")
    _log_table = _without("tables")
    _log_histograms = _without("histograms")
    _log_text = _without("text")
    _log_artifact = _without("artifacts")

    def _log_vectors(self, vectors: Mapping[str, Any], step: int | None) -> None:
        """Log tensors as histograms; warn about tensors that cannot be logged."""
        finite = self._finite_elements(vectors)
        try:
            if finite:
                self.log_histograms(finite, step=step)
        except UnsupportedError:
            for name in finite:
                warn_skipped(self.name, name, vectors[name])

    def _finite_elements(self, vectors: Mapping[str, Any]) -> dict[str, Any]:
        """Return the finite elements of tensors, for a histogram; warn where there are none."""
        finite = {name: to_finite(vector) for name, vector in vectors.items()}
        for name, numbers in finite.items():
            if not numbers.size:
                warn_skipped(self.name, name, vectors[name])
        return {name: numbers for name, numbers in finite.items() if numbers.size}


def check_attributes(tracker: type[GeneralTracker] | GeneralTracker) -> None:
    """Check that a tracker has the required attributes."""
    present = dir(tracker)
    absent = [name for name in ("name", "requires_logging_directory", "tracker") if name not in present]
    if absent:
        owner = tracker if isinstance(tracker, type) else type(tracker)
        raise UnsupportedError(
            f"The tracker {owner.__name__} is missing the following required attributes: "
            f"{', '.join(map(repr, absent))}. Define them as class attributes or properties."
        )


class NullTracker(GeneralTracker):
    """The tracker, and its library's object, on ranks that do not log: whatever is called does nothing.

    Example:
        >>> run = NullTracker("wandb").tracker
        >>> run.summary["best"] = run.log_figure("a", size=3).url
    """

    requires_logging_directory = False

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(_blank=True)

    def __getattribute__(self, name: str) -> Any:
        is_own = name.startswith("__") or name in ("name", "requires_logging_directory", "main_process_only")
        return super().__getattribute__(name) if is_own else self

    def __call__(self, *args: Any, **kwargs: Any) -> NullTracker:
        """Do nothing."""
        del args, kwargs
        return self

    __getitem__ = __setitem__ = __enter__ = __call__

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __exit__(self, *error: object) -> None: ...


def require_vendor(name: str, what: str) -> None:
    """Raise if the library of a tracker, which `what` needs, is absent."""
    require(name, what, install=f"accel-trackers[{name.replace('_', '-')}]")


def import_vendor(name: str, module: str | None = None) -> Any:
    """Import a module of a tracker's library, by default the module with the tracker's name."""
    require_vendor(name, f"The tracker {name!r}")
    return import_module(module or name)
