"""The trackers of one run: start them together, log to them in order, in the calling thread."""

from __future__ import annotations

import atexit
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any, Literal, TypeAlias

import torch

import accel_trackers
from accel_state import runtime
from accel_state.errors import SettingsError, TrackerError, UnsupportedError
from accel_state.labels import LoggerType
from accel_state.streams import DeviceStreams
from accel_trackers.general import GeneralTracker, NullTracker
from accel_trackers.values import copy_to_host, to_plain, with_numbers

logger = logging.getLogger(__name__)

OnTrackerError = Literal["raise", "warn"]
Trackers: TypeAlias = str | LoggerType | GeneralTracker | Sequence[str | LoggerType | GeneralTracker]
"""The values of `Accelerator(log_with=…)`."""

FLUSH_SECONDS = 10.0
"""Seconds between two flushes of the libraries by `log`."""

_NOT_RUNNING = {
    "new": "before init_trackers(). Call init_trackers() first.",
    "finished": "after end_training(), which finishes the trackers. Call it earlier, or call init_trackers() "
    "again.",
    "forked": "in a process forked from the one that started the trackers, and would damage their runs. Log "
    "in the parent process, or call init_trackers() in this process.",
}
"""What is wrong with a call of `log`, by the stage of the session."""

_MOST_WAITING = 256
"""Calls of `log` that may wait for a device; with more, the oldest is waited for."""


class TrackerSession:
    """The trackers of one `Accelerator`.

    All methods may be called on every rank. Only the main process logs, except to trackers whose
    `main_process_only` is False.

    `log_with` and `logging_dir` are the arguments of `filter_trackers`, and `on_error` is the
    `on_tracker_error` of the `Accelerator`.

    Example:
        >>> session = TrackerSession(None)
        >>> session.log({"loss": 0.5}, step=1)
        >>> session.trackers
        []
    """

    def __init__(
        self,
        log_with: Trackers | None,
        logging_dir: str | os.PathLike[str] | None = None,
        *,
        on_error: OnTrackerError = "raise",
    ) -> None:
        if on_error not in ("raise", "warn"):
            raise SettingsError(f"on_tracker_error={on_error!r}: expected 'raise' or 'warn'.")
        self.logging_dir = logging_dir
        self.choose(log_with)
        self.trackers: list[GeneralTracker] = []
        self._warns = on_error == "warn"
        self._stage: Literal["new", "running", "finished"] = "new"
        self._process: int | None = None
        self._waiting: deque[tuple[dict[str, Any], list[torch.Event], int | None, dict[str, Any]]] = deque()
        self._resumed: dict[str, str] = {}
        self._start_arguments: tuple[str, Any, Mapping[str, Any]] | None = None
        self._failed_before: set[str] = set()
        self._next_flush = 0.0

    @property
    def _is_forked(self) -> bool:
        """Whether the runs are those of the process from which this one was forked."""
        return self._process not in (None, os.getpid())

    @property
    def _active(self) -> list[GeneralTracker]:
        """The trackers that log in this process."""
        known = () if self._is_forked else self.trackers
        return [tracker for tracker in known if not isinstance(tracker, NullTracker)]

    def choose(self, log_with: Trackers | None) -> None:
        """Choose the trackers that `start` starts."""
        # Without trackers no library's module is imported.
        known = [] if log_with is None else accel_trackers.filter_trackers(log_with, self.logging_dir)
        self.log_with: list[str | GeneralTracker] = known

    def use(self, trackers: list[GeneralTracker]) -> None:
        """Replace the trackers of `start` by trackers that the caller has started; none if empty."""
        self._submit_ready(wait=True)
        self.trackers = trackers
        self._stage = "running"

    def start(
        self,
        project_name: str,
        config: Any = None,
        init_kwargs: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start every tracker and store the configuration, as `Accelerator.init_trackers`."""
        plain = {} if config is None else to_plain(config)
        if not isinstance(plain, dict):
            raise SettingsError(
                f"init_trackers(config={config!r}): expected a dictionary, a dataclass or an argparse "
                "namespace."
            )
        if self._stage == "running":
            self.finish()
        options = {str(name): dict(more) for name, more in (init_kwargs or {}).items()}
        self._start_arguments = (project_name, plain, options)
        if self.log_with and runtime.current_topology().is_main:
            names = [chosen if isinstance(chosen, str) else chosen.name for chosen in self.log_with]
            accel_trackers.warn_unknown_names("init_trackers(init_kwargs=…)", options, names)
        self._process = os.getpid()
        self.trackers = [self._start_tracker(chosen, project_name, options) for chosen in self.log_with]
        self._stage = "running"
        if config is not None:
            for tracker in self._active:
                self._call(tracker, "store_init_configuration", to_plain(plain))
        if self._active:
            self._next_flush = monotonic() + FLUSH_SECONDS
            atexit.register(self.write)

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[Any, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values to every tracker, as `Accelerator.log`.

        Tensors on a device are read when their copies are ready: at the next call, in order, or when `write`
        is called. Every ten seconds a call flushes the libraries.
        """
        # 1. Check the call as on a rank that logs.
        problem = _NOT_RUNNING.get("forked" if self._is_forked else self._stage)
        may_log = self._stage != "new" or runtime.current_topology().is_main
        if self.log_with and problem is not None and may_log:
            raise TrackerError(f"log() was called {problem}")
        if (self.log_with or self.trackers) and not isinstance(values, Mapping):
            raise UnsupportedError(f"log() got {values!r}: expected a dictionary of values by name.")
        # 2. Copy the values, and pass on those that have arrived.
        if self._stage != "running" or not self._active:
            return
        options = {str(name): more for name, more in (log_kwargs or {}).items()}
        streams: dict[torch.device, DeviceStreams] = {}
        copied = copy_to_host(values, streams)
        events: list[torch.Event] = []
        for used in streams.values():
            events.append(used.new_event())
            events[-1].record(used.current_stream())
        self._waiting.append((copied, events, step, options))
        self._submit_ready(wait=False)
        if monotonic() >= self._next_flush:
            self._flush()

    def get(self, name: str, *, unwrap: bool = False) -> Any:
        """Find a tracker, as `Accelerator.get_tracker`."""
        is_elsewhere = self._stage == "new" and not runtime.current_topology().is_main
        if not self.log_with or is_elsewhere or self._is_forked:
            wanted: GeneralTracker = NullTracker(name)
        else:
            by_name = {tracker.name: tracker for tracker in self.trackers}
            if name not in by_name:
                names = ", ".join(map(repr, by_name)) or "none: call init_trackers() first"
                raise SettingsError(f"get_tracker({name!r}): no such tracker. Available are {names}.")
            wanted = by_name[name]
        return wanted.tracker if unwrap else wanted

    def write(self) -> None:
        """Wait for all logged values, pass them to the trackers, and flush the trackers."""
        self._submit_ready(wait=True)
        self._flush()

    def finish(self) -> None:
        """Write everything and finish every tracker; do nothing if none is running.

        Raises:
            Exception: The first error of a tracker, when all are finished.
        """
        if self._stage != "running":
            return
        self._stage = "finished"
        atexit.unregister(self.write)
        errors: list[Exception] = []
        # The last to start ends first: several patch sys.stdout and restore what was there before.
        latest = reversed(self._active)
        for step in (self.write, *(partial(self._call, tracker, "finish") for tracker in latest)):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - the other trackers must be finished, too
                errors.append(error)
        if errors:
            raise errors.pop(0)

    def run_ids(self) -> dict[str, str]:
        """Return the ids for resuming the runs of this process, by the tracker's name."""
        ids = {tracker.name: tracker.run_id for tracker in self._active}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    def resume(self, run_ids: Mapping[str, str]) -> None:
        """Resume earlier runs: finish the current runs, and open the earlier ones.

        If `start` has not been called yet, it opens them. Trackers passed as objects do not change.
        """
        self._resumed = dict(run_ids)
        if self._stage != "running" or self._start_arguments is None:
            return
        project_name, config, options = self._start_arguments
        self._submit_ready(wait=True)
        for index, tracker in enumerate(self.trackers):
            run_id = run_ids.get(tracker.name)
            is_ours = tracker.name in self.log_with and not isinstance(tracker, NullTracker)
            if not is_ours or run_id in (None, tracker.run_id):
                continue
            if accel_trackers.tracker_class(tracker.name).resume_arguments(str(run_id)):
                self._call(tracker, "finish")
                self.trackers[index] = opened = self._start_tracker(tracker.name, project_name, options)
                self._call(opened, "store_init_configuration", to_plain(config))

    def _start_tracker(
        self, chosen: str | GeneralTracker, project_name: str, options: Mapping[str, Any]
    ) -> GeneralTracker:
        """Construct and start a tracker; return a null tracker on other ranks, or if that failed."""
        kind: Any = chosen if isinstance(chosen, GeneralTracker) else accel_trackers.tracker_class(chosen)
        if kind.main_process_only and not runtime.current_topology().is_main:
            return NullTracker(kind.name)
        try:
            tracker = kind
            if not isinstance(chosen, GeneralTracker):
                where = (self.logging_dir,) if kind.requires_logging_directory else ()
                known = self._resumed.get(chosen)
                resuming = {} if known is None else kind.resume_arguments(known)
                tracker = kind(project_name, *where, **{**resuming, **options.get(kind.name, {})})
            tracker.start()
        except Exception as error:  # noqa: BLE001 - raised, or logged in one line
            self._failed(kind.name, "start", error)
            return NullTracker(kind.name)
        return tracker

    def _submit_ready(self, *, wait: bool) -> None:
        """Pass queued calls whose values are on the host to every tracker, in order; with `wait`, all."""
        if not self._active:
            self._waiting.clear()
        while self._waiting:
            values, events, step, options = self._waiting[0]
            is_due = wait or len(self._waiting) > _MOST_WAITING
            if not is_due and not all(event.query() for event in events):
                return
            for event in events if is_due else ():
                event.synchronize()
            self._waiting.popleft()
            values = with_numbers(values)
            for tracker in self._active:
                self._call(tracker, "log", dict(values), step=step, **options.get(tracker.name, {}))

    def _call(self, tracker: GeneralTracker, method: str, *args: Any, **kwargs: Any) -> None:
        try:
            getattr(tracker, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(tracker.name, method, error)

    def _failed(self, name: str, method: str, error: Exception) -> None:
        """Raise the error of a tracker; with `on_error="warn"`, log the first one of each."""
        if not self._warns:
            error.add_note(
                f"The tracker {name!r} failed in {method}(). With on_tracker_error='warn', training "
                "continues."
            )
            raise error
        if name not in self._failed_before:
            self._failed_before.add(name)
            logger.warning("The tracker %r failed in %s(), and training continues: %r", name, method, error)

    def _flush(self) -> None:
        """Flush every tracker."""
        for tracker in self._active:
            self._call(tracker, "flush")
        self._next_flush = monotonic() + FLUSH_SECONDS
