"""Profile a block into Chrome traces; meter the steps of the training loop."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from accel_state import hang_monitor
from accel_state.logging import get_logger
from accel_state.runtime import Runtime

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

    from accel_plugins.kwargs import ProfileKwargs
    from accel_state.accelerator_state import GradientState
    from accel_train.accelerator.build import PreparedObjects


PROFILE_PATTERN_NAME = "profile_{suffix}.json"
"""The name of a trace; the suffix is the rank, and the number of the cycle after the first one."""

logger = get_logger(__name__)


@contextmanager
def profiling(handler: ProfileKwargs, runtime: Runtime) -> Generator[profile]:
    """Profile the block, as `Accelerator.profile`; all ranks wait until every trace is written."""
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
        profiler.export_chrome_trace(str(directory / PROFILE_PATTERN_NAME.format(suffix=suffix)))

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


_GIB = 2**30


class StepMeter:
    """Measure steps, samples, items and waits between two calls of `log`.

    It never synchronises with the device: it measures host time, and counted items stay tensors.
    """

    def __init__(self, gradient_state: GradientState, prepared: PreparedObjects, runtime: Runtime) -> None:
        self._gradient_state = gradient_state
        self._prepared = prepared
        self._runtime = runtime
        # By the loader's id. A wait counts when its batch is trained on; None: samples vary by batch.
        self._waits: dict[int, float] = {}
        self._samples_per_batch: dict[int, int | None] = {}
        self._since: float | None = None
        self._steps = 0
        self._restart()

    def timed(self, loader: Any, batches: Generator[Any]) -> Generator[Any]:
        """Yield the batches of an epoch, and measure how long the loop waits for them."""
        waits, key = self._waits, id(loader)
        self._samples_per_batch[key] = loader.total_batch_size if loader.counts_samples else None
        with closing(batches):
            begin = perf_counter()
            if self._since is None:
                self._since = begin
            for batch in batches:
                waits[key] = waits.get(key, 0.0) + perf_counter() - begin
                yield batch
                begin = perf_counter()

    def count_batch(self) -> None:
        """Count the current batch at its backward pass, at most once."""
        self._has_trained = True
        loader: Any = self._gradient_state.active_dataloader
        waited = self._waits.pop(id(loader), None)
        if waited is None:
            return
        self._waited += waited
        # The samples in the current batches of all ranks, without padding.
        per_batch = self._samples_per_batch[id(loader)]
        if loader.end_of_dataloader and loader.remainder > 0:
            self._samples += loader.remainder
        elif per_batch is not None:
            self._samples += per_batch
        else:
            self._samples += (loader.batch_size_seen or 0) * loader.total_batch_size

    def count_items(self, total: torch.Tensor, *, of_all_ranks: bool) -> None:
        """Count the items of an optimizer step."""
        name = "system/tokens_per_second" if of_all_ranks else "system/tokens_per_second_per_rank"
        before = self._items.get(name)
        self._items[name] = total if before is None else before + total

    def read(self) -> dict[str, Any]:
        """Return the metrics since the last call; empty if no optimizer has stepped since then.

        Time without training, such as an evaluation, is excluded if `read` is called before and after it.
        """
        now = perf_counter()
        num_steps = self._prepared.num_steps()
        steps, elapsed = num_steps - self._steps, now - (now if self._since is None else self._since)
        if steps <= 0 or elapsed <= 0:
            if not self._has_trained and self._since is not None:
                self._since = now
            return {}
        values: dict[str, Any] = {
            "system/step_seconds": elapsed / steps,
            "system/data_wait_share": self._waited / elapsed,
        }
        if self._samples:
            values["system/samples_per_second"] = self._samples / elapsed
        values |= {name: items / elapsed for name, items in self._items.items()}
        peak = getattr(self._runtime.kind.module, "max_memory_allocated", None)
        if peak is not None:
            values["system/device_memory_gib"] = peak(self._runtime.device) / _GIB
        monitor = hang_monitor.active()
        if monitor is not None and monitor.sampler is not None:
            values |= monitor.sampler.report
        self._since, self._steps = now, num_steps
        self._restart()
        return values

    def _restart(self) -> None:
        self._has_trained = False
        self._waited = 0.0
        self._samples = 0
        self._items: dict[str, torch.Tensor] = {}  # by the name of the value that `read` returns
