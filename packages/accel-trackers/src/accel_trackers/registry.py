"""The table of trackers: nine libraries, registered classes, classes of installed distributions."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from typing import Any, TypeVar, cast

from accel_state import libraries
from accel_state.errors import SettingsError, did_you_mean
from accel_state.labels import LoggerType
from accel_state.lazy import Registry, entry_points_of
from accel_trackers.aim import AimTracker
from accel_trackers.clearml import ClearMLTracker
from accel_trackers.dvclive import DVCLiveTracker
from accel_trackers.general import GeneralTracker, check_attributes, require_vendor
from accel_trackers.mlflow import MLflowTracker
from accel_trackers.project_runs import CometMLTracker, SwanLabTracker, TrackioTracker, WandBTracker
from accel_trackers.tensorboard import TensorBoardTracker

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "accel.trackers"
"""Third parties declare classes here: `[project.entry-points."accel.trackers"]`, `name = "module:Class"`."""

LOGGER_TYPE_TO_CLASS: dict[str, type[GeneralTracker]] = {
    tracker.name: tracker
    for tracker in (
        AimTracker,
        CometMLTracker,
        MLflowTracker,
        TensorBoardTracker,
        WandBTracker,
        ClearMLTracker,
        DVCLiveTracker,
        SwanLabTracker,
        TrackioTracker,
    )
}
"""The class of every tracker that `log_with` accepts by name, except classes of entry points."""

VENDORS = (*LOGGER_TYPE_TO_CLASS,)
"""The names of the libraries' trackers, which are keys of `accel_state.libraries.LIBRARIES`."""

_TRACKERS = Registry(
    group=ENTRY_POINT_GROUP,
    kind=type,
    noun="tracker",
    built_in=cast("dict[str, Any]", {**LOGGER_TYPE_TO_CLASS}),
)

_T = TypeVar("_T", bound=type[GeneralTracker])


def register_tracker_class(tracker_class: _T) -> _T:
    """Register a class for `log_with` by its name, before an `Accelerator` is constructed with it.

    The class is constructed by `init_trackers` with the project's name, the logging directory if it requires
    one, and its entry of `init_kwargs`.

    Raises:
        SettingsError: It is not such a class, its name is empty or `"all"`, or it does not declare whether it
            requires a directory.

    Warns:
        UserWarning: The class replaces another one with the same name, which may be a library's.

    Example:
        >>> @register_tracker_class
        ... class Silent(GeneralTracker):
        ...     name = "silent"
        ...     requires_logging_directory = False
        ...     tracker = None
        >>> filter_trackers("silent")
        ['silent']
        >>> del LOGGER_TYPE_TO_CLASS["silent"]
    """
    candidate: Any = tracker_class
    if not (isinstance(candidate, type) and issubclass(candidate, GeneralTracker)):
        raise SettingsError(f"register_tracker_class({candidate!r}): pass a subclass of GeneralTracker.")
    name: Any = getattr(candidate, "name", None)
    if not isinstance(name, str) or name in ("", LoggerType.ALL.value):
        raise SettingsError(f"{candidate.__name__}.name is {name!r}. Set it to a string other than 'all'.")
    if not hasattr(candidate, "requires_logging_directory"):
        raise SettingsError(
            f"{candidate.__name__} has no requires_logging_directory: set this class attribute to True if it "
            "is constructed with a directory, else to False."
        )
    known = LOGGER_TYPE_TO_CLASS.get(name, candidate)
    if known is not candidate:
        warnings.warn(f"The tracker {name!r} is now {candidate!r}, instead of {known!r}.", stacklevel=2)
    LOGGER_TYPE_TO_CLASS[name] = tracker_class
    return tracker_class


def get_available_trackers() -> list[LoggerType | str]:
    """List the available trackers: installed libraries, registered and third-party ones.

    Returns:
        Members of `LoggerType` for the libraries, names for the others.
    """
    # Programs patch these functions, for example to disable wandb.
    available = [name for name in VENDORS if getattr(libraries, f"is_{name}_available")()]
    registered = [name for name in _known_names() if name not in VENDORS]
    return [*(LoggerType(name) for name in available), *registered]


def filter_trackers(
    log_with: Any, logging_dir: str | os.PathLike[str] | None = None
) -> list[str | GeneralTracker]:
    """Return the requested trackers, each once; `"all"` selects all available ones.

    Args:
        log_with: A name, a `LoggerType`, a `GeneralTracker`, or a list of these; `None` for none.
        logging_dir: The folder of trackers that write files.

    Raises:
        SettingsError: A name is unknown, or a tracker requires a `logging_dir` and there is none.
        MissingDependencyError: Its library is not installed.
        UnsupportedError: An object lacks an attribute.

    Example:
        >>> filter_trackers(None)
        []
    """
    is_list = isinstance(log_with, (list, tuple, set))
    asked: Iterable[Any] = log_with if is_list else () if log_with is None else [log_with]
    chosen: list[str | GeneralTracker] = []
    for entry in asked:
        named = entry if isinstance(entry, GeneralTracker) else str(entry)
        more = get_available_trackers() if named == LoggerType.ALL.value else [named]
        chosen += [new if isinstance(new, GeneralTracker) else str(new) for new in more]
    unique = list(dict.fromkeys(chosen))
    for entry in unique:
        if isinstance(entry, GeneralTracker):
            check_attributes(entry)
            continue
        wanted = tracker_class(entry)
        if entry in VENDORS:
            require_vendor(entry, f"log_with={entry!r}")
        if wanted.requires_logging_directory and logging_dir is None:
            raise SettingsError(
                f"log_with contains {entry!r}, which writes files: set the folder with "
                "Accelerator(project_dir=…) or ProjectConfiguration(logging_dir=…)."
            )
    return unique


def tracker_class(name: str) -> type[GeneralTracker]:
    """Return the class of a tracker.

    Raises:
        SettingsError: There is none; or the entry point of that name is not a class, or has the name of a
            built-in tracker or of another distribution's.
    """
    known = LOGGER_TYPE_TO_CLASS.get(name)
    # A program may replace a built-in class, an installed distribution may not.
    if known is None or known is _TRACKERS.built_in.get(name):
        points = entry_points_of(ENTRY_POINT_GROUP).select(name=name)
        known = _TRACKERS.available(points)[name] if points else known
    if known is not None:
        return known
    names = [LoggerType.ALL.value, *_known_names()]
    hint = did_you_mean(name, names, "", cutoff=0.5)
    hint = f"{hint} " if hint else ""
    raise SettingsError(f"log_with contains {name!r}: {hint}It takes {', '.join(map(repr, names))}.")


def warn_unknown_names(argument: str, options: Iterable[str], names: Iterable[str]) -> None:
    """Warn about keys of an argument that name no tracker, in use or known, with the nearest name."""
    known = [*_known_names(), *names]
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known, f"there are {', '.join(map(repr, known))}.", cutoff=0.5)
            logger.warning("%s has options for %r, which is not a tracker: %s", argument, name, hint)


def _known_names() -> list[str]:
    return list(dict.fromkeys([*LOGGER_TYPE_TO_CLASS, *_TRACKERS.names()]))
