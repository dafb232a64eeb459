"""Profile a block of a training script, with one Chrome trace per rank."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from accel_state.available import require
from accel_state.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch.profiler import profile

    from accel_plugins.kwargs.profile import ProfileKwargs
    from accel_state.runtime import Runtime

PROFILE_PATTERN_NAME = "profile_{suffix}.json"
"""The name of a trace; the suffix is the rank, and the number of the cycle after the first one."""

logger = get_logger(__name__)


@contextmanager
def profiling(handler: ProfileKwargs, runtime: Runtime) -> Generator[profile]:
    """Profile the block, and write traces if the handler has a directory for them.

    Args:
        handler: What to record, and where to.
        runtime: The runtime of this process. All ranks wait until every trace is written.

    Raises:
        SettingsError: The profiler cannot be built as the handler says.
        MissingDependencyError: A flame graph needs plotly, which is not installed.
    """
    if handler.flame_graph:
        require("plotly", "ProfileKwargs(flame_graph=True)", install="accel-train[plot]")
    if handler.output_trace_dir is None:
        with handler.build() as profiler:
            yield profiler
        return
    traces = Traces(Path(handler.output_trace_dir), runtime.topology.rank, handler)
    with replace(handler, on_trace_ready=traces).build() as profiler:
        yield profiler
    if not traces.written:
        logger.warning(
            "profile() wrote no trace: schedule_option=%r records nothing before step %d, and "
            "profiler.step() was called %d times.",
            handler.schedule_option,
            sum((handler.schedule_option or {}).get(name, 0) for name in ("skip_first", "wait", "warmup")),
            profiler.step_num,
            main_process_only=False,
        )
    runtime.barrier()


class Traces:
    """Writer of every complete trace of a process to a file of its own.

    Args:
        handler: Its own `on_trace_ready` is called first.
    """

    def __init__(self, directory: Path, rank: int, handler: ProfileKwargs) -> None:
        self._directory = directory
        self._rank = rank
        self._handler = handler
        self.written: list[Path] = []

    def __call__(self, profiler: profile) -> None:
        """Write the trace that the profiler has completed."""
        if self._handler.on_trace_ready is not None:
            self._handler.on_trace_ready(profiler)
        cycle = len(self.written)
        suffix = f"{self._rank}_{cycle}" if cycle else f"{self._rank}"
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / PROFILE_PATTERN_NAME.format(suffix=suffix)
        profiler.export_chrome_trace(str(path))
        if self._handler.flame_graph:
            import_module("accel_train.flame").write_flame_graph(path, path.with_suffix(".html"))
        self.written.append(path)
