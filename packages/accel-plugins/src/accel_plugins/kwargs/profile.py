"""Options of the profiler."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from accel_plugins.kwargs.base import KwargsHandler, expect, expect_flags
from accel_state.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTIONS = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@dataclass
class ProfileKwargs(KwargsHandler):
    """Options of `torch.profiler.profile`.

    Args:
        activities: Activities to record, of `"cpu"`, `"cuda"`, `"xpu"`, `"mtia"`, `"hpu"`; all that this
            build of torch supports if `None`.
        schedule_option: Arguments of `torch.profiler.schedule` (`wait`, `warmup`, `active`, `repeat`,
            `skip_first`, …); records every step if `None`.
        on_trace_ready: Called with the profiler whenever a trace is complete.
        record_shapes: Whether shapes of inputs are recorded.
        profile_memory: Whether allocations are recorded.
        with_stack: Whether source lines are recorded.
        with_flops: Whether floating point operations are estimated.
        with_modules: Whether the hierarchy of modules is recorded.
        output_trace_dir: Directory into which `Accelerator.profile` writes a Chrome trace of each process.
        flame_graph: Whether a flame graph `profile_<rank>.html` that opens offline is written next to each
            trace, which needs plotly; `with_stack` adds Python functions to it.

    Raises:
        SettingsError: A field has another type.

    Example:
        >>> with ProfileKwargs(activities=["cpu"]).build() as profiler:
        ...     _ = torch.ones(2) + 1
        >>> any("add" in event.key for event in profiler.key_averages())
        True
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None
    flame_graph: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        expect_flags(self)
        expect(self, "activities", "a list of names, or None", lambda value: not isinstance(value, str))
        if self.flame_graph and self.output_trace_dir is None:
            raise SettingsError(
                f"{type(self).__name__}(flame_graph=True): has no effect without output_trace_dir, the folder"
                " that it is written to."
            )

    def build(self) -> torch.profiler.profile:
        """Make the profiler.

        Raises:
            SettingsError: An activity is not supported, or `schedule_option` lacks or misspells an argument.
        """
        schedule = None if self.schedule_option is None else self._schedule(self.schedule_option)
        activities = None if self.activities is None else [_activity(name) for name in self.activities]
        return torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            on_trace_ready=self.on_trace_ready,
            **{name: getattr(self, name) for name in _OPTIONS},
        )

    def _schedule(self, options: dict[str, int]) -> Callable[[int], torch.profiler.ProfilerAction]:
        accepted = inspect.signature(torch.profiler.schedule)
        try:
            accepted.bind(**options)
        except TypeError as error:
            raise SettingsError(
                f"ProfileKwargs(schedule_option={options!r}): {error}; "
                f"torch.profiler.schedule{accepted} takes these."
            ) from None
        return torch.profiler.schedule(**options)


def _activity(name: str) -> ProfilerActivity:
    supported = torch.profiler.supported_activities()
    names = {known.lower(): row for known, row in ProfilerActivity.__members__.items() if row in supported}
    if name not in names:
        raise SettingsError(
            f"ProfileKwargs(activities=[{name!r}]): this build of torch records {sorted(names)}."
        )
    return names[name]
