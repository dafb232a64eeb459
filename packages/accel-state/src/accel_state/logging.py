"""Rank-aware loggers and progress bars."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, Self, TypeVar, cast, overload

from accel_state import runtime
from accel_state.environ import parse_choice_from_env
from accel_state.errors import SettingsError

_VARIABLE = "ACCELERATE_LOG_LEVEL"


class MultiProcessAdapter(logging.LoggerAdapter["logging.Logger"]):
    """A logger that logs on the main process only by default.

    Every method of a logger takes two more arguments: `main_process_only` (default `True`) and, with
    `main_process_only=False`, `in_order` (default `False`), which makes ranks log one after the other;
    then all processes must make the call, whatever their levels. No state needs to exist.
    """

    def __init__(self, logger: logging.Logger, extra: Mapping[str, object] | None = None) -> None:
        super().__init__(logger, extra)
        self._logged: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message.

        Example:
            >>> get_logger("example").log(logging.DEBUG, "loaded %d rows", 3, main_process_only=False)
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # the line of the caller, not this one
        takes_turns = in_order and not main_process_only
        # Ranks may have different levels: the others wait for one that logs nothing.
        if not takes_turns and not self.isEnabledFor(level):
            return
        topology = runtime.current_topology()
        message, options = self.process(msg, cast("MutableMapping[str, Any]", kwargs))
        if not takes_turns:
            if topology.is_main or not main_process_only:
                self.logger.log(level, message, *args, **options)
            return
        for rank in range(topology.world_size):
            if rank == topology.rank:
                self.logger.log(level, message, *args, **options)
            runtime.active.barrier()

    def warning_once(self, *args: Any, **kwargs: Any) -> None:
        """Log a warning once for the same arguments."""
        key = repr((args, sorted(kwargs.items())))
        if key not in self._logged:
            self._logged.add(key)
            kwargs.setdefault("stacklevel", 3)
            self.warning(*args, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that logs on the main process only by default.

    Args:
        name: As in `logging.getLogger`, such as `__name__`.
        log_level: The lowest level that is logged, such as `"INFO"`. Defaults to the variable
            `ACCELERATE_LOG_LEVEL`, and without it to the configuration of `logging`.

    Raises:
        SettingsError: The level does not exist.

    Example:
        >>> logger = get_logger("my_script")
        >>> logger.info("logged by the main process")
        >>> logger.debug("logged by each", main_process_only=False)
    """
    logger = logging.getLogger(name)
    source = "log_level" if log_level is not None else _VARIABLE
    level = log_level if log_level is not None else parse_choice_from_env(_VARIABLE, "")
    if level:
        known = logging.getLevelNamesMapping()
        if level.upper() not in known:
            raise SettingsError(f"{source}={level!r} is not a level. Use one of {', '.join(known)}.")
        logger.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


T_co = TypeVar("T_co", covariant=True)


class ProgressBar(Protocol[T_co]):
    """The type of a tqdm progress bar, as tqdm has no type hints; it may have more methods."""

    def __iter__(self) -> Iterator[T_co]: ...
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *error: object) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def update(self, n: float = ..., /) -> bool | None:
        """Advance the bar."""
        ...

    def close(self) -> None:
        """Finish the bar."""
        ...


@overload
def tqdm(
    iterable: Iterable[T_co], /, *args: Any, main_process_only: bool = ..., **kwargs: Any
) -> ProgressBar[T_co]: ...
@overload
def tqdm(*args: Any, main_process_only: bool = ..., **kwargs: Any) -> ProgressBar[Any]: ...
def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> ProgressBar[Any]:
    """Create a `tqdm` progress bar that only the first process of each node shows.

    A child process, such as a rank of `notebook_launcher`, shows a text bar: the widgets of a notebook
    accept updates from its own process only.

    Args:
        *args: As in `tqdm.auto.tqdm`, which wraps any iterable.
        main_process_only: Set to `False` to show a bar on every process.
        **kwargs: As in `tqdm.auto.tqdm`.

    Example:
        >>> list(tqdm(range(3), disable=True))
        [0, 1, 2]
    """
    from tqdm.auto import tqdm as progress_bar
    from tqdm.std import tqdm as text_bar

    if main_process_only and not runtime.current_topology().is_local_main:
        kwargs["disable"] = True
    bar: Any = progress_bar if multiprocessing.parent_process() is None else text_bar
    return bar(*args, **kwargs)
