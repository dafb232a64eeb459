"""Directories, profiling and description of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from accel_plugins.kwargs.profile import ProfileKwargs
from accel_state.html_table import html_table
from accel_train.accelerator.facet import Facet
from accel_train.profiling import profiling

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch.profiler import profile

    from accel_plugins.kwargs.run import ProjectConfiguration


class ObserveFacet(Facet):
    """Directories, profiling, and what an accelerator shows of itself."""

    __slots__ = ()

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """Directories, and how checkpoints are named and kept."""
        return self._parts.project

    @property
    def project_dir(self) -> str | Path | None:
        """Directory of the project's files."""
        return self._parts.project.project_dir

    @property
    def logging_dir(self) -> str | Path | None:
        """Directory of the trackers' files."""
        return self._parts.project.logging_dir

    def __repr__(self) -> str:
        return f"Accelerator({', '.join(f'{name}={value!r}' for name, value in self._facts().items())})"

    def _repr_html_(self) -> str:
        rows = [(name.replace("_", " "), value) for name, value in self._facts().items()]
        return html_table(rows, title="Accelerator")

    def _facts(self) -> dict[str, str | int]:
        if not hasattr(self, "_parts"):  # shown in the traceback of a constructor that failed
            return {}
        state, process = self._parts.state, self._parts.process
        return {
            "device": str(process.device),
            "process_index": process.process_index,
            "num_processes": process.num_processes,
            "distributed_type": state.distributed_type.value,
            "mixed_precision": state.mixed_precision,
            "gradient_accumulation_steps": self._parts.gradient_state.num_steps,
        }

    @property
    def profile_handler(self) -> ProfileKwargs | None:
        """The `ProfileKwargs` of the accelerator."""
        return self._parts.handlers.get(ProfileKwargs)  # pyright: ignore[reportReturnType] - by its own type

    def profile(self, profile_handler: ProfileKwargs | None = None) -> AbstractContextManager[profile]:
        """Record the block with `torch.profiler`.

        With `output_trace_dir`, every process writes a Chrome trace `profile_<rank>.json` there, and one
        `profile_<rank>_<n>.json` for every further cycle of `schedule_option`. With `flame_graph` there is an
        HTML page of each, which opens offline.

        Args:
            profile_handler: What to record; the accelerator's `ProfileKwargs` if `None`.

        Raises:
            SettingsError: The profiler cannot be built as the handler says.
            MissingDependencyError: A flame graph needs plotly, which is not installed.

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
