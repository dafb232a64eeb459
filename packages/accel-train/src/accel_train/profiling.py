"""Profile a block of a training script, with one Chrome trace per rank."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from itertools import count
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
    """Profile the block, as `Accelerator.profile`; all ranks wait until every trace is written."""
    if handler.flame_graph:
        require("plotly", "ProfileKwargs(flame_graph=True)", install="accel-train[plot]")
    if handler.output_trace_dir is None:
        with handler.build() as profiler:
            yield profiler
        return
    directory, rank = Path(handler.output_trace_dir), runtime.topology.rank
    cycles = count()

    def write(profiler: profile) -> None:
        if handler.on_trace_ready is not None:
            handler.on_trace_ready(profiler)
        directory.mkdir(parents=True, exist_ok=True)
        cycle = next(cycles)
        suffix = f"{rank}_{cycle}" if cycle else f"{rank}"
        path = directory / PROFILE_PATTERN_NAME.format(suffix=suffix)
        profiler.export_chrome_trace(str(path))
        if handler.flame_graph:
            import_module("accel_train.flame").write_flame_graph(path, path.with_suffix(".html"))

    with replace(handler, on_trace_ready=write).build() as profiler:
        yield profiler
    if next(cycles) == 0:
        logger.warning(
            "profile() wrote no trace: schedule_option=%r records nothing before step %d, and "
            "profiler.step() was called %d times.",
            handler.schedule_option,
            sum((handler.schedule_option or {}).get(name, 0) for name in ("skip_first", "wait", "warmup")),
            profiler.step_num,
            main_process_only=False,
        )
    runtime.barrier()
