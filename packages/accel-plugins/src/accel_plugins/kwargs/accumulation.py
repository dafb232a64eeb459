"""Options of gradient accumulation."""

from __future__ import annotations

from dataclasses import dataclass

from accel_plugins.kwargs.base import KwargsHandler, expect, expect_flags, is_count


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Options of gradient accumulation over several micro-batches per optimizer step.

    Args:
        num_steps: Number of micro-batches per optimizer step.
        adjust_scheduler: Whether schedulers count optimizer steps; otherwise they count micro-batches.
        sync_with_dataloader: Whether the last batch of a loader always ends a step.
        sync_each_batch: Whether gradients are all-reduced after every micro-batch, which costs communication
            and saves memory under strategies that shard gradients.

    Raises:
        SettingsError: A field is out of its range.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        wanted = "a whole number above 0, or None"
        expect(self, "num_steps", wanted, lambda value: value is None or is_count(value, least=1))
        expect_flags(self, "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
