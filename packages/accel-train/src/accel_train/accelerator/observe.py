"""Profiling of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.kwargs.profile import ProfileKwargs
from accel_train.accelerator.facet import Facet
from accel_train.profiling import profiling

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.profiler import profile


class ObserveFacet(Facet):
    """Profiling."""

    __slots__ = ()

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The `ProfileKwargs` of the accelerator."""
        return self._parts.handlers.get(ProfileKwargs)  # pyright: ignore[reportReturnType] - by its own type

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Record the block with `torch.profiler`.

        With `output_trace_dir`, every process writes a Chrome trace `profile_<rank>.json` there, and one
        `profile_<rank>_<n>.json` for every further cycle of `schedule_option`.

        Args:
            profile_handler: What to record; the accelerator's `ProfileKwargs` if `None`.

        Raises:
            SettingsError: The profiler cannot be built as the handler says.

        Example:
            >>> import torch
            >>> from accel_train import Accelerator
            >>> with Accelerator(cpu=True).profile() as profiler:
            ...     _ = torch.ones(2) + 1
            >>> any("add" in event.key for event in profiler.key_averages())
            True
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        return profiling(handler, self._parts.process.runtime)
