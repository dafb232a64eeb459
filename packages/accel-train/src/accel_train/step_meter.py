"""Measure the speed of a training loop, for `Accelerator(log_system_metrics=True)`."""

from __future__ import annotations

from contextlib import closing
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import torch

    from accel_state.gradient_state import GradientState
    from accel_state.runtime import Runtime
    from accel_train.optimizer import AcceleratedOptimizer

_GIB = 2**30
_MEMORY_SECONDS = 1.0
"""The allocator's statistics take up to a tenth of a millisecond, so that they are not read at every step."""


class StepMeter:
    """Meter of steps, samples, items and waits between two calls of `log`.

    Nothing waits for a device: time is the host's, and counted items stay tensors.
    """

    def __init__(
        self, gradient_state: GradientState, optimizers: Sequence[AcceleratedOptimizer], runtime: Runtime
    ) -> None:
        self._gradient_state = gradient_state
        self._optimizers = optimizers
        self._runtime = runtime
        self._waits: dict[int, float] = {}  # by the loader's id; taken when its batch is trained on
        self._samples_per_batch: dict[int, int | None] = {}  # as above; None: counted batch by batch
        self._since: float | None = None
        self._memory: float | None = None
        self._memory_read = float("-inf")
        self._steps = 0
        self._restart()

    def timed(self, loader: Any, batches: Generator[Any]) -> Generator[Any]:
        """Yield the batches of one pass, and measure how long they let the loop wait."""
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
        """Count the batch at hand, of which a backward pass begins; harmless if it is counted already."""
        self._has_trained = True
        loader: Any = self._gradient_state.active_dataloader
        waited = self._waits.pop(id(loader), None)
        if waited is not None:
            self._waited += waited
            self._samples += _samples_of(loader, self._samples_per_batch[id(loader)])

    def count_items(self, total: torch.Tensor, *, of_all_ranks: bool) -> None:
        """Count the items of an optimizer step."""
        name = "system/tokens_per_second" if of_all_ranks else "system/tokens_per_second_per_rank"
        before = self._items.get(name)
        self._items[name] = total if before is None else before + total

    def read(self) -> dict[str, Any]:
        """Return what was measured since the last time; nothing if no optimizer has stepped since then.

        Time in which nothing was trained, such as that of an evaluation, is left out if `read` is called
        before it and after it.
        """
        now = perf_counter()
        num_steps = max((optimizer.num_steps for optimizer in self._optimizers), default=0)
        taken, elapsed = num_steps - self._steps, now - (now if self._since is None else self._since)
        if taken <= 0 or elapsed <= 0:
            if not self._has_trained and self._since is not None:
                self._since = now
            return {}
        values: dict[str, Any] = {
            "system/step_seconds": elapsed / taken,
            "system/data_wait_share": self._waited / elapsed,
        }
        if self._samples:
            values["system/samples_per_second"] = self._samples / elapsed
        values |= {name: items / elapsed for name, items in self._items.items()}
        memory = self._device_memory(now)
        if memory is not None:
            values["system/device_memory_gib"] = memory
        self._since, self._steps = now, num_steps
        self._restart()
        return values

    def _restart(self) -> None:
        self._has_trained = False
        self._waited = 0.0
        self._samples = 0
        self._items: dict[str, torch.Tensor] = {}  # by the name of their speed

    def _device_memory(self, now: float) -> float | None:
        """Return the peak memory of tensors on this process's device; `None` if unknown."""
        if now - self._memory_read > _MEMORY_SECONDS:
            self._memory_read = now
            peak = getattr(self._runtime.kind.module, "max_memory_allocated", None)
            self._memory = None if peak is None else peak(self._runtime.device) / _GIB
        return self._memory


def _samples_of(loader: Any, per_batch: int | None) -> int:
    """Return the number of samples in the current batches of all ranks, without padding."""
    if loader.end_of_dataloader and loader.remainder > 0:
        return loader.remainder
    if per_batch is not None:
        return per_batch
    return (loader.batch_size_seen or 0) * loader.total_batch_size  # which counts batches
